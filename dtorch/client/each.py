"""Tensors as each device along some mesh axes sees them: its own part, or term, as if it were the whole.

Between ``to_each`` and ``from_each`` every device computes on what it holds, with ordinary operators that communicate
nothing along these axes: what the devices hold there differs although it counts as replicated. So no value may be read
between the two (``refuse_reads``). (The idea is that of torch's ``local_map`` and JAX's ``shard_map``.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.client import aliasing
from dtorch.client.lower import encode_move
from dtorch.client.session import Session
from dtorch.client.sites import caller
from dtorch.client.tensor import DTensor
from dtorch.client.wrap import wrap
from dtorch.core.errors import DtorchError, PlacementError
from dtorch.core.placements import REPLICATE, Partial, Placement, Shard
from dtorch.core.spec import TensorSpec, contiguous_strides, dense_strides
from dtorch.core.steps import Step


def to_each(t: DTensor, axes: Sequence[int]) -> DTensor:
    """What each device along the axes holds, of the shape it has there; differentiable.

    Raises:
        PlacementError: the tensor is cut into uneven pieces along the axes.
    """
    return _ToEach.apply(t, tuple(axes))  # type: ignore[no-any-return, no-untyped-call]


def from_each(t: DTensor, placements: dict[int, Placement]) -> DTensor:
    """The tensor whose parts, or terms, the devices hold: mesh axis -> ``Shard`` or ``Partial``; differentiable."""
    return _FromEach.apply(t, placements)  # type: ignore[no-any-return, no-untyped-call]


def exchange(t: DTensor, axis: int) -> DTensor:
    """All-to-all of what each device along an axis of N has: (N, C, ...) -> (N, C, ...); differentiable.

    What device ``s`` has at index ``d`` device ``d`` gets at index ``s``.
    """
    return _Exchange.apply(t, axis)  # type: ignore[no-any-return, no-untyped-call]


def refuse_reads(session: Session, reads_before: int, what: str) -> None:
    """To be called where tensors have been as each device sees them, with ``session.reads`` as it was at the start.

    Raises:
        DtorchError: a value came to the client meanwhile; it was that of one device.
    """
    if session.reads != reads_before:
        raise DtorchError(
            f"{what} reads values, or shapes that depend on them, which differ from device to device here; so it cannot run "
            "on each device's part by itself."
        )


def even(spec: TensorSpec, axes: Sequence[int]) -> bool:
    """Whether the pieces of the tensor along these axes all have one size."""
    parts = [1] * spec.ndim
    for axis, p in enumerate(spec.placements):
        if isinstance(p, Shard):
            parts[p.dim] *= spec.mesh.shape[axis]
    cut = {p.dim for a in axes if isinstance(p := spec.placements[a], Shard)}
    return all(spec.shape[d] % parts[d] == 0 for d in cut)


def _each_spec(spec: TensorSpec, axes: Sequence[int]) -> TensorSpec:
    shape = list(spec.shape)
    for a in axes:
        p = spec.placements[a]
        if isinstance(p, Shard):
            shape[p.dim] //= spec.mesh.shape[a]
    placements = tuple(REPLICATE if a in axes else p for a, p in enumerate(spec.placements))
    return TensorSpec(spec.mesh, placements, tuple(shape), dense_strides(shape, spec.shape, spec.stride), spec.dtype)


def _whole_spec(spec: TensorSpec, placements: dict[int, Placement]) -> TensorSpec:
    shape = list(spec.shape)
    for a, p in placements.items():
        if isinstance(p, Shard):
            shape[p.dim] *= spec.mesh.shape[a]
    where = tuple(placements.get(a, p) for a, p in enumerate(spec.placements))
    return TensorSpec(spec.mesh, where, tuple(shape), dense_strides(shape, spec.shape, spec.stride), spec.dtype)


def _renamed(t: Any, spec: TensorSpec) -> Any:
    """A tensor in the same memory, of which the client thinks otherwise."""
    aliasing.refresh(t)
    session, src = t._h.session, t._h.spec
    return _emit(session, t._h.id, src, spec, ())


def _emit(session: Session, tensor_id: int, src: TensorSpec, dst: TensorSpec, steps: tuple[Step, ...]) -> Any:
    key = ("each", src, dst, steps)
    code = session.plans.get(key)
    if code is None:
        with session.lock:
            code = session.send_plan(encode_move(session, steps, src, dst))
        session.plans[key] = code
    new = session.ids()
    session.sites.append(caller(sys._getframe(1)))
    session.buf.extend((code, tensor_id, new))
    session.emitted()
    return wrap(session, new, dst)


class _ToEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, axes: tuple[int, ...]) -> Any:
        spec = t._h.spec
        if not even(spec, axes):
            raise PlacementError(f"{spec} is cut into uneven pieces along mesh axes {list(axes)}.")
        ctx.back = {a: p if isinstance(p, Shard) else Partial("sum") for a in axes for p in (spec.placements[a],)}
        return _renamed(t, _each_spec(spec, axes))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return from_each(grad, ctx.back), None


class _FromEach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, placements: dict[int, Placement]) -> Any:
        ctx.placements = placements
        return _renamed(t, _whole_spec(t._h.spec, placements))

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        wanted = list(grad.placements)
        for a, p in ctx.placements.items():
            wanted[a] = REPLICATE if p.is_partial() else p
        return to_each(grad.redistribute(placements=wanted), tuple(ctx.placements)), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, axis: int) -> Any:
        ctx.axis = axis
        aliasing.refresh(t)
        session, spec = t._h.session, t._h.spec
        n, c, *rest = spec.shape
        # As one tensor: dimension 0 by receiver, dimension 1 by sender.
        stride = contiguous_strides((n, n * c, *rest))
        whole = TensorSpec(spec.mesh, spec.placements, (n, n * c, *rest), stride, spec.dtype)
        by_sender, by_receiver = (
            whole.replace(tuple(Shard(d) if a == axis else p for a, p in enumerate(spec.placements))) for d in (1, 0)
        )
        step = Step("all_to_all", axis, by_sender, by_receiver)
        if session.observer is not None:
            session.observer.moved(by_sender, by_receiver, (step,), sys._getframe(1))
        came = TensorSpec(spec.mesh, spec.placements, (1, n * c, *rest), contiguous_strides((1, n * c, *rest)), spec.dtype)
        return _emit(session, t._h.id, spec, came, (step,)).view(n, c, *rest)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return exchange(grad.contiguous(), ctx.axis), None  # type: ignore[arg-type]
