"""Doing something once a module has been imported, for modules that a program may never import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watcher(MetaPathFinder):
    """Sees one module being imported."""

    def __init__(self, module: str, action: Callable[[], Any]) -> None:
        self._module, self._action = module, action

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As the other finders find the module, with the action after its execution.

        Whoever asks whether a module is installed finds it as well, and does not execute it.
        """
        if name != self._module:
            return None
        further = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next((s for f in further if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                self._action()

            loader.exec_module = execute_and_act
        return spec


def after_import(module: str, action: Callable[[], Any]) -> None:
    """Call `action` once `module` has been imported and its code has run; at once where that is so."""
    if module in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(module, action))
