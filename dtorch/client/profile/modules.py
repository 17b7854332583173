"""Which module of the program runs: global hooks on the calls of modules, while a profile runs."""

from __future__ import annotations

import sys
import threading
from time import monotonic_ns
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dtorch.client.sites import Site, caller


class Call:
    """One call of a module.

    Attributes:
        name: of its root's class, and its own name within the root.
        depth: number of calls around it.
        site: where it was called, for those at depth 0.
        start, end: nanoseconds.
        thread: that called it.
    """

    __slots__ = ("depth", "end", "name", "site", "start", "thread")

    def __init__(self, name: str, depth: int, site: Site | None) -> None:
        self.name, self.depth, self.site = name, depth, site
        self.thread = threading.get_ident()
        self.start = self.end = monotonic_ns()


class Modules:
    """Follows the calls of modules from ``start`` to ``stop``.

    Attributes:
        calls: those that have ended.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._names: dict[int, str] = {}
        self._roots: list[torch.nn.Module] = []  # so that no other module gets the id of one
        self._local = threading.local()

    def start(self) -> None:
        """Begin to follow."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Follow no longer."""
        for hook in self._hooks:
            hook.remove()

    def current(self) -> str | None:
        """Name of the module that runs in this thread."""
        try:
            return self._local.stack[-1].name  # type: ignore[no-any-return]
        except (AttributeError, IndexError):
            return None

    def _stack(self) -> list[Call]:
        found: list[Call] | None = getattr(self._local, "stack", None)
        if found is None:
            found = self._local.stack = []
        return found

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        stack = self._stack()
        if id(module) not in self._names:
            self._name(module)
        site = None if stack else caller(sys._getframe(1))
        stack.append(Call(self._names[id(module)], len(stack), site))

    def _leave(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        stack = self._stack()
        if stack:  # the call may have begun before the profile
            call = stack.pop()
            call.end = monotonic_ns()
            self.calls.append(call)

    def _name(self, root: torch.nn.Module) -> None:
        self._roots.append(root)
        kind = type(root).__name__
        for name, module in root.named_modules():
            self._names[id(module)] = f"{kind}.{name}" if name else kind
