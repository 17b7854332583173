"""Rules are tested in inline mode: workers run within the test's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch


@pytest.fixture(scope="module", autouse=True)
def inline() -> Iterator[None]:
    """An inline session for the tests of one file."""
    dtorch.shutdown()
    dtorch.init(mode="inline")
    yield
    dtorch.shutdown()
