"""``torch.save`` and pickle of distributed tensors: the global value travels, placements are kept.

The pickle names one function of dtorch, ``rebuild``, which is declared safe for ``torch.load(weights_only=True)``: it
makes a tensor from plain values and can do nothing else.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement
from dtorch.protocol.values import decode_placement, encode_placement


def reduce_tensor(t: Any) -> tuple[Any, ...]:
    """The reduction of ``t`` for pickle."""
    mesh: DeviceMesh = t.device_mesh
    names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
    where = [encode_placement(p) for p in t.placements]
    is_parameter = isinstance(t, torch.nn.Parameter)
    value = t.detach().to_torch()
    return rebuild, (value, mesh.device_type, mesh.mesh.tolist(), names, where, t.requires_grad, is_parameter)


def rebuild(
    value: torch.Tensor,
    device_type: str,
    devices: list[Any],
    names: list[str] | None,
    placements: list[Any],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    """A distributed tensor with the value, on the mesh of these devices."""
    from dtorch.client.tensor import distribute_tensor

    mesh = DeviceMesh(device_type, devices, mesh_dim_names=names)
    where: list[Placement] = [decode_placement(p) for p in placements]
    out = distribute_tensor(value.detach(), mesh, where)
    if is_parameter:
        return torch.nn.Parameter(out, requires_grad)
    return out.requires_grad_(requires_grad)
