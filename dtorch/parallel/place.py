"""Putting a module's parameters and buffers onto a mesh: the same module, ties kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dtorch.client.factories import make
from dtorch.client.graph import current_session
from dtorch.client.tensor import DTensor, distribute_tensor
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement

Where = Callable[[str, torch.Tensor], tuple[DeviceMesh, tuple[Placement, ...]]]


def place(module: nn.Module, where: Where) -> nn.Module:
    """Replace every parameter and buffer by a distributed one.

    Args:
        module: changed in place.
        where: mesh and placements for a full name and tensor. A tensor that occurs under several names goes where its
            first name goes and stays one tensor.
    """
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for prefix, part in module.named_modules():
        for store in (part._parameters, part._buffers):
            for name, old in list(store.items()):
                if old is None:
                    continue
                if id(old) not in done:
                    full = f"{prefix}.{name}" if prefix else name
                    done[id(old)] = (_placed(old, *where(full, old)), old)
                store[name] = done[id(old)][0]
    return module


def _placed(old: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    with torch.no_grad():
        data = old.detach()
        if data.is_meta and current_session().config.null_workers:
            # Planned only: there are no values to place.
            new: torch.Tensor = make(torch.empty, tuple(data.shape), {"dtype": data.dtype}, mesh, placements, None)
        elif isinstance(data, DTensor):
            new = data.redistribute(mesh, placements)
        else:
            new = distribute_tensor(data, mesh, placements)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
        new.__dict__.update({k: v for k, v in old.__dict__.items() if k not in ("_h", "_is_param")})
    return new
