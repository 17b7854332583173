"""ZeRO: optimizer states (1), gradients (2) and parameters (3) cut along the data-parallel axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtorch.client.tensor import DTensor
from dtorch.core.placements import Placement, Replicate, Shard


def shard_states(module: nn.Module, dp_axes: Sequence[int], stage: int) -> None:
    """Cut every parameter's dimension along ``dp``.

    All stages keep the parameter itself cut, so gradients and optimizer states, which are made like it, are cut as
    well; before a module uses its parameters they are gathered, and gradients return by reduce-scatter.
    """
    if not dp_axes:
        return
    for part in module.modules():
        own: dict[str, Any] = {n: p for n, p in part._parameters.items() if isinstance(p, DTensor)}
        cut = {n: p for n, p in own.items() if _cut(part, n, p, dp_axes)}
        if cut:
            _gather_before_use(part, list(cut), dp_axes)


def _cut(part: nn.Module, name: str, p: DTensor, dp_axes: Sequence[int]) -> bool:
    wanted: list[Placement] = list(p.placements)
    used = {q.dim for q in wanted if isinstance(q, Shard)}
    dim = next((d for d in range(p.dim()) if d not in used and p.shape[d] > 1), None)
    if dim is None:
        return False
    for axis in dp_axes:
        wanted[axis] = Shard(dim)
    with torch.no_grad():
        bare = p.detach()
        assert isinstance(bare, DTensor)
        moved = bare.redistribute(placements=wanted)
    p._h, moved._h = moved._h, p._h
    return True


def _gather_before_use(part: nn.Module, names: Sequence[str], dp_axes: Sequence[int]) -> None:
    def gather(_: nn.Module, args: Any) -> None:
        for name in names:
            p = part._parameters[name]
            assert isinstance(p, DTensor)
            wanted: list[Placement] = list(p.placements)
            for axis in dp_axes:
                wanted[axis] = Replicate()
            part.__dict__[name] = p.redistribute(placements=wanted)

    def drop(_: nn.Module, args: Any, output: Any) -> None:
        for name in names:
            part.__dict__.pop(name, None)

    part.register_forward_pre_hook(gather)
    part.register_forward_hook(drop, always_call=True)
