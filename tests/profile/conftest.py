"""As the engine's tests: each test says in which modes; sessions have as many processes and threads on every machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import mode, one_thread
from tests.order import local_last

__all__ = ["mode", "one_thread"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs worker processes comes last, so that they start once."""
    local_last(items, HERE)
