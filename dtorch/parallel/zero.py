"""ZeRO: optimizer states (1), gradients (2) and parameters (3) cut along the data-parallel axes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dtorch.client.handle import Handle
from dtorch.client.specials import LIKE
from dtorch.client.tensor import DTensor
from dtorch.client.wrap import is_alone, re_place
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.core.spec import TensorSpec
from dtorch.core.torch_private import trees


def shard_states(module: nn.Module, dp_axes: Sequence[int], stage: int) -> None:
    """Cut along ``dp`` what the stage names, of every parameter that has a free dimension.

    1. What an optimizer makes like a parameter is cut: each device updates its piece, and the new pieces are gathered.
    2. Gradients are reduce-scattered as soon as they are complete.
    3. Parameters themselves are cut, so that gradients and states, made like them, are as well; a module gathers its own
       for the time of its forward, and again of its backward, and gradients return by reduce-scatter.
    """
    if not dp_axes:
        return
    for part in module.modules():
        own: dict[str, Any] = {n: p for n, p in part._parameters.items() if isinstance(p, DTensor)}
        cut = {n: where for n, p in own.items() if (where := _cut(p, dp_axes)) is not None}
        if stage < 3:
            for name, where in cut.items():
                _cut_states(own[name], where, stage)
            continue
        for name, where in cut.items():
            _move(own[name], where)
        if cut:
            _gather_before_use(part, list(cut), dp_axes)


def _cut(p: DTensor, dp_axes: Sequence[int]) -> list[Placement] | None:
    """The placements with a dimension that is whole so far cut along ``dp``; ``None``: there is none."""
    wanted: list[Placement] = list(p.placements)
    used = {q.dim for q in wanted if isinstance(q, Shard)}
    dim = next((d for d in range(p.dim()) if d not in used and p.shape[d] > 1), None)
    if dim is None:
        return None
    for axis in dp_axes:
        wanted[axis] = Shard(dim)
    return wanted


def _cut_states(p: DTensor, where: list[Placement], stage: int) -> None:
    if LIKE in p.__dict__:  # tied to one met before
        return
    p.__dict__[LIKE] = where
    _cut_made_otherwise()
    if stage == 2:

        def scatter(p: torch.Tensor) -> None:
            if isinstance(p.grad, DTensor) and list(p.grad.placements) != where:
                p.grad = p.grad.redistribute(placements=where)

        p.register_post_accumulate_grad_hook(scatter)  # type: ignore[no-untyped-call]


@cache
def _cut_made_otherwise() -> None:
    """From now on, cut the states that optimizers do not make like a parameter (SGD clones a gradient)."""

    def cut(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p, state in optimizer.state.items():
            where: list[Placement] | None = p.__dict__.get(LIKE) if isinstance(p, DTensor) else None
            if where is None:
                continue
            for value in state.values():
                if isinstance(value, DTensor) and value.shape == p.shape and list(value.placements) != where:
                    _move(value, where)

    register_optimizer_step_post_hook(cut)


def _move(t: DTensor, where: list[Placement]) -> None:
    """Re-place a tensor as the object it is."""
    with torch.no_grad():
        bare = t.detach()
        assert isinstance(bare, DTensor)
        moved = bare.redistribute(placements=where)
    t._h, moved._h = moved._h, t._h


def _gather_before_use(part: nn.Module, names: Sequence[str], dp_axes: Sequence[int]) -> None:
    def whole(placements: Sequence[Placement]) -> list[Placement]:
        return [Replicate() if axis in dp_axes else p for axis, p in enumerate(placements)]

    def gather(_: nn.Module, args: Any) -> None:
        for name in names:
            p = part._parameters[name]
            assert isinstance(p, DTensor)
            part.__dict__[name] = p.redistribute(placements=whole(p.placements))

    def drop(_: nn.Module, args: Any, output: Any) -> None:
        gathered = {name: t for name in names if (t := part.__dict__.pop(name, None)) is not None}
        results = [t for t in trees().tree_leaves(output) if isinstance(t, DTensor) and t.requires_grad]
        if not results:
            return
        # What autograd has saved of them is cut meanwhile, and whole again when the gradient arrives; it frees it then.
        saved: list[tuple[weakref.ref[Handle], TensorSpec]] = []
        for name, t in gathered.items():
            p = part._parameters[name]
            if isinstance(p, DTensor) and is_alone(t._h):
                saved.append((weakref.ref(t._h), t._h.spec))
                re_place(t._h, p._h.spec)

        def gather_again(grad: torch.Tensor) -> None:
            while saved:
                ref, spec = saved.pop()
                handle = ref()
                if handle is not None:
                    re_place(handle, spec)

        for t in results:
            t.register_hook(gather_again)  # type: ignore[no-untyped-call]

    part.register_forward_pre_hook(gather)
    part.register_forward_hook(drop, always_call=True)
