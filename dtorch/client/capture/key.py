"""Which calls of a captured function are of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtorch.client import aliasing
from dtorch.client.handle import Handle
from dtorch.client.notices import is_strict
from dtorch.client.tensor import DTensor
from dtorch.core.mesh import current_mesh
from dtorch.core.torch_private import function_modes, trees

_PLAIN = frozenset({DTensor, int, float, bool, str, type(None)})
_BY_VALUE = frozenset({torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, complex, bytes})


class Same:
    """An object as part of a key: equal to itself alone. Keeps it, so that no other takes its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.value is self.value


class Arguments:
    """The arguments of one call.

    Attributes:
        key: equal for calls of one kind: structure, specs of tensors, other values, and the modes torch is in.
        leaves: the arguments, nested ones taken apart.
        tensors: the distinct distributed tensors among them, in order.
        objects: those of the leaves that can change inside.
        plain: the first plain tensor among them, or ``None``.
    """

    __slots__ = ("handles", "key", "leaves", "objects", "plain", "tensors")

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        leaves = [*args, *kwargs.values()]
        structure: Any = (len(args), *kwargs)
        for a in leaves:
            if type(a) not in _PLAIN:
                leaves, structure = trees().tree_flatten((tuple(args), dict(kwargs)))
                break
        self.leaves: list[Any] = leaves
        self.tensors: list[Any] = []
        self.handles: list[Handle] = []
        self.objects: list[Any] = []
        self.plain: torch.Tensor | None = None
        key = _modes()
        key.append(structure)
        for a in leaves:
            self._add(key, a)
        self.key = tuple(key)

    def _add(self, key: list[Any], a: Any) -> None:
        t = type(a)
        if t is DTensor:
            h = a._h
            if h.odd and h._view is not None:
                aliasing.refresh(a)
            handles = self.handles
            if h in handles:
                key.append(handles.index(h))
            else:
                key.append(h.spec)
                handles.append(h)
                self.tensors.append(a)
            key.append(a.storage_offset())
            key.append(a.requires_grad)
        elif t is float:
            key.append(a.hex())  # tells zeros and nan apart from each other
            key.append(t)
        elif a is None or t is int or t is bool or t is str or t in _BY_VALUE:
            key.append(t)
            key.append(a)
        else:
            if isinstance(a, torch.Tensor):
                self.plain = a
            key.append(Same(a))
            self.objects.append(a)


def _modes() -> list[Any]:
    """What torch looks at beside the arguments."""
    cast = torch.is_autocast_enabled("dtorch")
    return [
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
        torch.get_autocast_dtype("dtorch") if cast else None, torch.get_default_device() if function_modes() else None,
        current_mesh(), is_strict(), torch.backends.cuda.flash_sdp_enabled(),
    ]  # fmt: skip
