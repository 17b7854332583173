"""The ``dtorch`` device exists as soon as a program has imported torch and dtorch, in whichever order.

``import dtorch`` does not import torch. Where torch is there already, the device is registered at once; otherwise when
torch has been imported, unless a module of dtorch does that for itself (a worker has no use for the device).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watcher(MetaPathFinder):
    """Sees torch being imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the other finders find torch, with the registration after its execution."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = next((s for f in sys.meta_path if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None and not _imported_by_dtorch():
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module("dtorch.api")

            loader.exec_module = execute_and_register
        return spec


def _imported_by_dtorch() -> bool:
    """Whether a module of dtorch stands on the stack, other than this one."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("dtorch.") and name != __name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def watch() -> None:
    """Register the device now, or once torch is there."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Watcher())
    elif not _imported_by_dtorch():
        importlib.import_module("dtorch.api")
