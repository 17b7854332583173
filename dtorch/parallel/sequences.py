"""Where sequences are cut for context parallelism, in models whose first input is no sequence or not the only one.

diffusers' transformers say so themselves (``_cp_plan``). Those that do not, and take images, have a sequence from their
first layer on: its inputs are cut, and what the model returns is made whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.parallel.inputs import map_tensors, on_mesh
from dtorch.parallel.pipeline import find_layers


def cut_sequences(module: nn.Module, mesh: DeviceMesh, axes: Sequence[int]) -> bool:
    """Cut sequences inside the model along mesh axes; returns whether it is such a model.

    Args:
        module: gets hooks.
        mesh: of the inputs.
        axes: of the mesh.
    """
    plan = getattr(module, "_cp_plan", None)
    if isinstance(plan, Mapping):
        for pattern, entry in plan.items():
            for part in _matching(module, pattern):
                _apply(part, entry, mesh, axes)
        return True
    if getattr(module, "main_input_name", None) or not hasattr(module, "config_name"):  # what diffusers' models have
        return False
    try:
        layers = find_layers(module)
    except PlacementError:
        return False
    _cut_arguments(next(iter(layers.values())), None, mesh, axes)
    _whole_results(module, axes)
    return True


def _matching(module: nn.Module, pattern: str) -> Iterator[nn.Module]:
    """The modules that a name with ``*`` for one part stands for."""
    wanted = pattern.split(".") if pattern else []
    for name, part in module.named_modules():
        parts = name.split(".") if name else []
        if len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True)):
            yield part


def _apply(part: nn.Module, entry: Any, mesh: DeviceMesh, axes: Sequence[int]) -> None:
    """One entry of a ``_cp_plan``: a dict of what is cut by argument name or result number, or what is made whole."""
    if not isinstance(entry, Mapping):
        _whole_results(part, axes)
        return
    _cut_arguments(part, {k: v for k, v in entry.items() if isinstance(k, str)}, mesh, axes)
    results = {k: v for k, v in entry.items() if isinstance(k, int)}
    if results:
        part.register_forward_hook(lambda _module, _args, out: _cut_results(out, results, mesh, axes))


def _cut_results(out: Any, entries: Mapping[int, Any], mesh: DeviceMesh, axes: Sequence[int]) -> Any:
    if isinstance(out, torch.Tensor):
        return _cut(out, entries.get(0), mesh, axes)
    return type(out)(_cut(v, entries.get(i), mesh, axes) for i, v in enumerate(out))


def _cut_arguments(part: nn.Module, entries: Mapping[str, Any] | None, mesh: DeviceMesh, axes: Sequence[int]) -> None:
    """Cut arguments by name before every call; without entries, dimension 1 of all that have three."""
    signature = inspect.signature(part.forward)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if entries is None:
            return map_tensors(args, cut_any), map_tensors(kwargs, cut_any)
        given = signature.bind_partial(*args, **kwargs)
        for name, entry in entries.items():
            value = given.arguments.get(name)
            if isinstance(value, (list, tuple)) and not isinstance(entry, (list, tuple)):
                given.arguments[name] = type(value)(_cut(v, entry, mesh, axes) for v in value)
            elif value is not None:
                given.arguments[name] = _cut(value, entry, mesh, axes)
        return given.args, given.kwargs

    def cut_any(t: torch.Tensor) -> torch.Tensor:
        return _along(t, 1, mesh, axes) if t.dim() == 3 else t

    part.register_forward_pre_hook(hook, with_kwargs=True)


def _cut(value: Any, entry: Any, mesh: DeviceMesh, axes: Sequence[int]) -> Any:
    """A tensor cut as an entry (``split_dim``, ``expected_dims``) says; a list of entries is for a list of tensors."""
    if isinstance(entry, (list, tuple)):
        return type(value)(_cut(v, e, mesh, axes) for v, e in zip(value, entry, strict=True))
    if entry is None or not isinstance(value, torch.Tensor) or entry.expected_dims not in (None, value.dim()):
        return value
    return _along(value, entry.split_dim, mesh, axes)


def _along(t: torch.Tensor, dim: int, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The tensor with a dimension cut along the axes; one of size one stays whole."""
    t = on_mesh(t, mesh) if not hasattr(t, "placements") else t
    wanted: list[Placement] = list(t.placements)  # type: ignore[attr-defined]
    for axis in axes:
        if t.shape[dim] > 1 and wanted[axis].is_replicate():
            wanted[axis] = Shard(dim)
    return t.redistribute(placements=wanted)  # type: ignore[attr-defined,no-any-return]


def _whole_results(part: nn.Module, axes: Sequence[int]) -> None:
    """After every call, what is cut along the axes is made whole."""

    def whole(t: torch.Tensor) -> torch.Tensor:
        if not hasattr(t, "placements"):
            return t
        wanted = [Replicate() if axis in axes else p for axis, p in enumerate(t.placements)]
        return t.redistribute(placements=wanted)  # type: ignore[attr-defined,no-any-return]

    def hook(_: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, dict):  # of a library's own class
            for name, value in out.items():
                out[name] = map_tensors(value, whole)
            return out
        return map_tensors(out, whole)

    part.register_forward_hook(hook)
