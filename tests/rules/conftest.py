"""Rules are tested in inline mode: workers run within the test's process. Values come from them, not host copies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch
from dtorch.client import wrap


@pytest.fixture(scope="module", autouse=True)
def inline() -> Iterator[None]:
    """An inline session for the tests of one file, whose small tensors keep no copy in the client."""
    dtorch.shutdown()
    dtorch.init(mode="inline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wrap, "_SHADOW_WHOLE", -1)
        patch.setattr(wrap, "_SHADOW_REAL", -1)
        yield
    dtorch.shutdown()
