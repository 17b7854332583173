"""Inputs of a parallel module: moved to its mesh, batches cut along ``dp``, sequences along the ``cp`` axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dtorch.client.tensor import DTensor, distribute_tensor
from dtorch.core.mesh import DeviceMesh, axis_kind
from dtorch.core.placements import Placement, Replicate, Shard


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with every tensor in its lists, tuples and dicts changed; other objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {k: map_tensors(v, change) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(v, change) for v in value)
    return value


def on_mesh(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The tensor on this mesh; placements stay when both meshes have the same shape, else it is replicated."""
    if not isinstance(t, DTensor):
        return distribute_tensor(t, mesh)
    if t.device_mesh == mesh:
        return t
    same = tuple(t.device_mesh.mesh.shape) == tuple(mesh.mesh.shape)
    return t.redistribute(mesh, t.placements if same else [Replicate()] * mesh.ndim)


def _balanced(dim: int, size: int) -> Shard:
    """Every device gets an early and a late piece, so that under a causal mask all have as much to do."""
    return Shard(dim, (size // 2, size // 2 - size))


def cut_inputs(
    module: nn.Module,
    mesh: DeviceMesh,
    batch_axes: Sequence[int],
    sequence_axes: Sequence[int],
    last: DeviceMesh | None = None,
) -> None:
    """Before every call of ``module``, cut its tensor arguments.

    Dimension 0 is the batch and dimension 1 the sequence, for arguments whose sizes there are those of the first
    tensor argument. What an argument's own placements already cut stays as it is, and so does a batch of one.

    Args:
        module: the whole model.
        mesh: of its first stage, to which arguments go.
        batch_axes, sequence_axes: of the mesh.
        last: mesh of the last stage; ``labels`` go there at once, so that no early stage must hand them on later.
    """

    rings = [axis for axis in sequence_axes if axis_kind((mesh.mesh_dim_names or ())[axis]) == "ring_cp"]

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and a.dim() > 0), None)
        if first is None:
            return args, kwargs
        batch = first.shape[0]
        sequence = first.shape[1] if first.dim() > 1 else None

        def change(t: torch.Tensor, there: DeviceMesh = mesh) -> torch.Tensor:
            t = on_mesh(t, there)
            assert isinstance(t, DTensor)
            wanted: list[Placement] = list(t.placements)
            for axis in batch_axes:
                if t.dim() > 0 and t.shape[0] == batch > 1 and wanted[axis].is_replicate():
                    wanted[axis] = Shard(0)
            for axis in sequence_axes:
                if t.dim() > 1 and t.shape[1] == sequence and wanted[axis].is_replicate():
                    wanted[axis] = _balanced(1, sequence) if axis in rings else Shard(1)
            return t if tuple(wanted) == t.placements else t.redistribute(placements=wanted)

        def to_last(t: torch.Tensor) -> torch.Tensor:
            return change(t, last or mesh)

        kwargs = {k: map_tensors(v, to_last if k == "labels" else change) for k, v in kwargs.items()}
        return map_tensors(args, change), kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
