"""Layouts are tested in this process: sixteen virtual devices cost no more than two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch


@pytest.fixture(autouse=True)
def inline() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(mode="inline")
    yield
    dtorch.shutdown()
