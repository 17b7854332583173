"""What a function reads beside its arguments: modules, optimizers, closures, globals; and whether it has changed.

From the function on, everything it can reach is visited: attributes, items, cells of closures, the globals it names.
What is found is compared by identity, in C loops: a parameter that was replaced, a flag, a learning rate. Values that
live on the workers may change freely; plain tensors may not. Out of sight are the insides of objects without
``__dict__``, of library modules and of numpy arrays.

Most of a model's state is attributes of its modules, which hardly ever change: they are compared only when, since the last
time, an attribute of one of them was set, or a parameter, buffer, module or hook registered. Parameters and buffers, which
libraries also write past that, are compared always.
"""

from __future__ import annotations

import functools
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dtorch.client.session import Session
from dtorch.client.tensor import DTensor
from dtorch.core.mesh import DeviceMesh

_MOST = 200_000
_SCALARS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})
_OPAQUE = (
    type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, Session, DeviceMesh, torch.Generator,
)  # fmt: skip
_LIBRARY = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
# Of a module's own attributes those that torch keeps for it; what they hold is visited, or does not matter to a call.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}


_changes = [0]  # how often some module that a state has seen was changed
_seen: set[int] = set()  # their identities; one that another module has now makes a comparison too many
_CHANGING = ("__setattr__", "__delattr__", "register_buffer", "register_parameter", "add_module")


@functools.cache
def watch_modules() -> None:
    """From now on, count when a module is changed."""

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def change(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(self) in _seen:
                _changes[0] += 1
            return method(self, *args, **kwargs)

        return change

    for name in _CHANGING:
        setattr(torch.nn.Module, name, counting(getattr(torch.nn.Module, name)))


def _module_epoch() -> tuple[int, int]:
    """Differs when a module was changed or a hook registered meanwhile."""
    return _changes[0], RemovableHandle.next_id


class _Slots:
    """Entries of dicts, with the values they had."""

    def __init__(self) -> None:
        self.owners: list[dict[Any, Any]] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []

    def add(self, owner: dict[Any, Any], key: Any) -> Any:
        """Enter one; returns its value."""
        value = owner[key]
        self.owners.append(owner)
        self.keys.append(key)
        self.values.append(value)
        return value

    def hold(self) -> bool:
        """Whether all have the very values they had."""
        return all(map(is_, map(dict.get, self.owners, self.keys), self.values))

    def changed(self) -> Iterator[tuple[dict[Any, Any], Any, Any, Any]]:
        """Owner, key, old and new value of those that have not even an equal one."""
        for owner, key, old in zip(self.owners, self.keys, self.values, strict=True):
            new = owner.get(key, _GONE)
            if not _equal(new, old):
                yield owner, key, old, new

    def renew(self) -> None:
        """Compare with the values of now from now on."""
        self.values = list(map(dict.get, self.owners, self.keys))


class TooMuch(Exception):
    """More can be reached than is worth comparing."""


class State:
    """A picture of everything that can be reached from some objects.

    Attributes:
        tensors: the distributed tensors found, once each.

    Raises:
        TooMuch: that is too much.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.tensors: list[Any] = []
        self._paths: dict[int, str] = {}
        self._slots, self._attributes = _Slots(), _Slots()
        self._cells: list[Any] = []
        self._contents: list[Any] = []
        self._lists: list[Any] = []
        self._items: list[list[Any]] = []
        self._sized: list[Any] = []
        self._of_modules: list[Any] = []  # dicts of hooks and attributes
        self._epoch = _module_epoch()
        self._plain: list[torch.Tensor] = []
        todo: deque[tuple[Any, str]] = deque((root, _name(root)) for root in roots)
        while todo:
            value, path = todo.popleft()
            if type(value) in _SCALARS or id(value) in self._paths:
                continue
            self._paths[id(value)] = path
            if len(self._paths) + len(self._slots.keys) > _MOST:
                raise TooMuch
            todo.extend(self._visit(value, path))
        self._module_sizes = list(map(len, self._of_modules))
        self._hooked = [t for t in self.tensors if _hooks_of(t)]
        self._empty = [x for x in self._sized if not x]  # most are: modules without parameters of their own
        self._sized = [x for x in self._sized if x]
        self._sizes = list(map(len, self._sized))
        self._ids = [t._h.id for t in self.tensors]
        self._versions = [_version(t) for t in self._plain]
        self.handles = [t._h for t in self.tensors]

    # -- finding ----------------------------------------------------------------------------------------------------
    def _visit(self, value: Any, path: str) -> Iterator[tuple[Any, str]]:
        if isinstance(value, DTensor):
            self.tensors.append(value)
            for hooks in _hooks_of(value):
                self._sized.append(hooks)
                yield from self._entries(hooks, list(hooks), f"{path}.hooks", "[{}]")
        elif isinstance(value, torch.Tensor):
            self._plain.append(value)
        elif isinstance(value, torch.nn.Module):
            yield from self._module(value, path)
        elif isinstance(value, dict):
            self._sized.append(value)
            yield from self._entries(value, list(value), path, "[{!r}]")
        elif isinstance(value, (list, tuple, deque)):
            self._lists.append(value)
            self._items.append(list(value))
            for i, v in enumerate(value):
                yield v, f"{path}[{i}]"
        elif isinstance(value, (set, frozenset)):
            self._sized.append(value)
        elif hasattr(type(value), "captured_function"):
            yield value.captured_function, path
        elif isinstance(value, functools.partial):
            yield from ((v, path) for v in (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from ((v, _name(v)) for v in (value.__self__, value.__func__))
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
            own = vars(value)
            self._sized.append(own)
            yield from self._entries(own, list(own), path, ".{}")

    def _entries(
        self, owner: dict[Any, Any], keys: list[Any], path: str, form: str, slots: _Slots | None = None
    ) -> Iterator[tuple[Any, str]]:
        slots = slots or self._slots
        for key in keys:
            yield slots.add(owner, key), path + form.format(key)
        self._paths.setdefault(id(owner), path)

    def _module(self, module: torch.nn.Module, path: str) -> Iterator[tuple[Any, str]]:
        own = vars(module)
        _seen.add(id(module))
        self._of_modules.append(own)
        yield from self._entries(own, [k for k in own if k not in _OF_TORCH], path, ".{}", self._attributes)
        for name in ("_parameters", "_buffers"):
            self._of_modules.append(own[name])
            yield from self._entries(own[name], list(own[name]), path, ".{}")
        inner = own["_modules"]
        (self._sized if inner else self._of_modules).append(inner)
        yield from self._entries(inner, list(inner), path, ".{}", self._attributes)
        for name in _HOOKS:
            self._of_modules.append(own[name])
            if own[name]:
                self._sized.append(own[name])
                yield from self._entries(own[name], list(own[name]), f"{path}.{name}", "[{}]")

    def _function(self, function: types.FunctionType) -> Iterator[tuple[Any, str]]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cells.append(cell)
            self._contents.append(_content(cell))
            yield self._contents[-1], name
        for values in (function.__defaults__ or (), (function.__kwdefaults__ or {}).values()):
            for v in values:
                yield v, f"a default of {function.__name__}"
        if function.__code__.co_filename.startswith(_LIBRARY):
            return
        names = [n for n in _globals_named(function.__code__) if n in function.__globals__]
        for name in names:
            if not isinstance(function.__globals__[name], types.ModuleType):
                yield from self._entries(function.__globals__, [name], "", "{}")

    # -- comparing --------------------------------------------------------------------------------------------------
    def holds(self) -> bool:
        """Whether nothing has changed."""
        if (
            self._slots.hold()
            and list(map(len, self._sized)) == self._sizes
            and not any(self._empty)
            and (_module_epoch() == self._epoch or self._modules_hold())
            and [t._h.id for t in self.tensors] == self._ids
            and all(map(_same_items, self._lists, self._items))
            and all(map(is_, map(_content, self._cells), self._contents))
            and (not self._plain or [_version(t) for t in self._plain] == self._versions)
        ):
            return True
        return self.change() is None and self._accept()

    def _modules_hold(self) -> bool:
        epoch = _module_epoch()
        if not self._attributes.hold() or list(map(len, self._of_modules)) != self._module_sizes:
            return False
        if not _same_items([t for t in self.tensors if _hooks_of(t)], self._hooked):
            return False
        self._epoch = epoch
        return True

    def change(self) -> str | None:
        """What has changed, in words; ``None`` if nothing has."""
        for owner, key, old, new in (*self._attributes.changed(), *self._slots.changed()):
            return f"{self._path(owner, key)} ({_brief(old)} became {_brief(new)})"
        sizes = [*self._sizes, *[0] * len(self._empty), *self._module_sizes]
        for sized, size in zip([*self._sized, *self._empty, *self._of_modules], sizes, strict=True):
            if len(sized) != size:
                return f"the number of entries of {self._paths.get(id(sized), 'an object')}"
        for t in self.tensors:
            if bool(_hooks_of(t)) != any(t is hooked for hooked in self._hooked):
                return f"the hooks of {self._paths[id(t)]}"
        for t, number in zip(self.tensors, self._ids, strict=True):
            if t._h.id != number:
                return f"{self._paths[id(t)]}, which is another tensor now"
        for items, old_items in zip(self._lists, self._items, strict=True):
            if len(items) != len(old_items) or not all(map(_equal, items, old_items)):
                return self._paths[id(items)]
        for cell, old in zip(self._cells, self._contents, strict=True):
            if not _equal(_content(cell), old):
                return f"a variable of an enclosing function ({_brief(old)} became {_brief(_content(cell))})"
        for p, version in zip(self._plain, self._versions, strict=True):
            if _version(p) != version:
                return f"{self._paths[id(p)]}, a plain tensor that was written"
        return None

    def _accept(self) -> bool:
        """Equal numbers have been set again: those are compared from now on."""
        self._slots.renew()
        self._attributes.renew()
        self._epoch = _module_epoch()
        self._items = list(map(list, self._lists))
        self._contents = list(map(_content, self._cells))
        return True

    def _path(self, owner: Any, key: Any) -> str:
        path = self._paths.get(id(owner), "")
        return f"{path}.{key}" if path else str(key)


_GONE = object()


def _hooks_of(t: torch.Tensor) -> list[dict[Any, Any]]:
    """The hooks that run when a tensor gets its gradient."""
    return [h for h in (t._backward_hooks, getattr(t, "_post_accumulate_grad_hooks", None)) if h]


def _same_items(items: Any, old: list[Any]) -> bool:
    return len(items) == len(old) and all(map(is_, items, old))


def _equal(new: Any, old: Any) -> bool:
    return new is old or (type(new) is type(old) and type(old) in _SCALARS and new == old)


def _brief(value: Any) -> str:
    return "nothing" if value is _GONE else repr(value)[:40] if type(value) in _SCALARS else f"a {type(value).__name__}"


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _GONE


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or type(value).__name__


def _globals_named(code: types.CodeType) -> list[str]:
    """Global names in a function and those within it."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_globals_named(constant))
    return names
