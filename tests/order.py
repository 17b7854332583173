"""The order of tests."""

from __future__ import annotations

from pathlib import Path

import pytest


def local_last(items: list[pytest.Item], folder: Path) -> None:
    """Move the folder's tests in local mode to the end, so that worker processes start once."""

    def is_local(item: pytest.Item) -> bool:
        spec = getattr(item, "callspec", None)
        return folder in item.path.parents and spec is not None and spec.params.get("mode") == "local"

    items.sort(key=is_local)
