"""How a distributed tensor changes its placements: which collectives, in which order, and what they cost.

A redistribution is a path through states. A state is a mesh with one placement per axis; an edge changes the
placement of one axis by the collective of the textbook, or moves all boxes at once (to another mesh, or where nested
shards of one tensor dimension make every single-axis collective wrong). `plan_steps` takes the cheapest path.
Everything here is a pure function of the two specs, so client, workers and a replay find the same steps.

Several partial axes: the value is the reduction over the last partial axis first, then the one before it, and so on
(as shards nest). Axes of the same reduction may be reduced in any order, but for averages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

import torch

from dtorch.core.errors import PlacementError
from dtorch.core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from dtorch.core.spec import MeshLayout, TensorSpec, box_shape, dense_strides
from dtorch.core.steps import Step, common_boxes

LATENCY_BYTES = 65536
"""A step's fixed cost, as the bytes each device could have sent in that time (100 us at 0.6 GB/s)."""

LOCAL_COST = 64.0
"""What a step without communication counts in `cost`: next to nothing, but more than no step."""

# ---------------------------------------------------------------------------------------------------- planning


@lru_cache(maxsize=16384)
def plan_steps(src: TensorSpec, dst: TensorSpec) -> tuple[Step, ...]:
    """The cheapest steps from one spec to the other; none when the local tensors are already the wanted ones.

    Cheapest: bytes between devices, plus `LATENCY_BYTES` per device and communicating step (a move counts as one step
    for every mesh axis). So among large tensors the fewest bytes win, among small ones the fewest steps.

    Raises:
        PlacementError: shapes or dtypes differ, or a reduction is not defined for the dtype.
    """
    _check(src, dst)
    if src.mesh == dst.mesh and src.placements == dst.placements:
        return () if _same_layout(src, dst) else (Step("slice", 0, src, dst),)
    same_mesh = src.mesh == dst.mesh
    goal = (True, dst.placements)
    start = (same_mesh, src.placements)
    best: dict[tuple[bool, tuple[Placement, ...]], tuple[float, int, int]] = {start: (0.0, 0, 0)}
    came: dict[tuple[bool, tuple[Placement, ...]], tuple[tuple[bool, tuple[Placement, ...]], str, int]] = {}
    queue: list[tuple[tuple[float, int, int], int, tuple[bool, tuple[Placement, ...]]]] = [(best[start], 0, start)]
    ticket = 0  # keeps equal scores in the order they were found
    while queue:
        score, _, state = heapq.heappop(queue)
        if state == goal:
            break
        if score > best[state]:
            continue
        for there, kind, axis, price in _edges(state, src, dst):
            reached = (score[0] + price, score[1] + (kind == "move"), score[2] + 1)
            if there not in best or reached < best[there]:
                best[there] = reached
                came[there] = (state, kind, axis)
                ticket += 1
                heapq.heappush(queue, (reached, ticket, there))
    return _steps(goal, start, came, src, dst)


def _steps(
    goal: tuple[bool, tuple[Placement, ...]],
    start: tuple[bool, tuple[Placement, ...]],
    came: dict[tuple[bool, tuple[Placement, ...]], tuple[tuple[bool, tuple[Placement, ...]], str, int]],
    src: TensorSpec,
    dst: TensorSpec,
) -> tuple[Step, ...]:
    """The path that was found, as steps; the first one already gives the wanted memory order."""
    path = []
    state = goal
    while state != start:
        before, kind, axis = came[state]
        path.append((kind, axis, state))
        state = before
    steps, here = [], src
    for kind, axis, (moved, placements) in reversed(path):
        there = TensorSpec(dst.mesh if moved else src.mesh, placements, dst.shape, dst.stride, dst.dtype)
        there = dst if there == dst else there
        steps.append(Step(kind, axis, here, there))
        here = there
    return tuple(steps)


def _edges(
    state: tuple[bool, tuple[Placement, ...]], src: TensorSpec, dst: TensorSpec
) -> Iterator[tuple[tuple[bool, tuple[Placement, ...]], str, int, float]]:
    """Every step worth taking from a state: the state after it, kind, axis, price."""
    moved, placements = state
    mesh = dst.mesh if moved else src.mesh
    for axis in range(len(placements)):
        for then in _options(axis, moved, src, dst):
            kind = step_kind(placements, axis, then)
            if kind:
                after = (*placements[:axis], then, *placements[axis + 1 :])
                price = _axis_bytes(kind, axis, placements, mesh, dst.nbytes)
                yield (moved, after), kind, axis, price + _latency(kind, mesh)
    if not any(isinstance(p, Partial) for p in placements):
        after = tuple(REPLICATE if isinstance(p, Partial) else p for p in dst.placements)
        if not moved or after != placements:
            here, there = src.replace(placements, mesh), dst.replace(after)
            yield (True, after), "move", -1, _move_bytes(here, there) + _latency("move", mesh, dst.mesh)


def _options(axis: int, moved: bool, src: TensorSpec, dst: TensorSpec) -> list[Placement]:
    """Placements worth having on an axis on the way: the old, the new, replicated; a partial one also scattered."""
    found: list[Placement] = [REPLICATE]
    if moved:
        found.append(dst.placements[axis])
    if src.mesh == dst.mesh or not moved:
        found.append(src.placements[axis])
        if isinstance(src.placements[axis], Partial) and src.ndim:
            # What follows then handles less. A dimension that nothing else cuts, the longest of them, serves best.
            found.append(Shard(max(range(src.ndim), key=lambda d: (src.shards_of(d) == 1, src.shape[d]))))
    return list(dict.fromkeys(found))


def step_kind(placements: Sequence[Placement], axis: int, then: Placement) -> str:
    """The kind of step that changes the placement of this one axis, "" if there is none (or nothing to change)."""
    now, inner = placements[axis], placements[axis + 1 :]
    if now == then:
        return ""
    for p in (now, then):
        # An inner axis that cuts the same dimension cuts what this axis leaves: its boxes would change as well.
        if isinstance(p, Shard) and any(q.is_shard(p.dim) for q in inner):
            return ""
        if isinstance(p, Partial) and any(isinstance(q, Partial) and q != p for q in inner):
            return ""
    if now in inner and isinstance(now, Partial) and now.reduce_op == "avg":
        return ""  # averages of integers are rounded, so their order counts as well
    if isinstance(now, Shard):
        if isinstance(then, Partial):  # zeros (ones) around the shard are terms of a sum (product)
            return "mask" if then.reduce_op in ("sum", "product") else ""
        return "all_to_all" if isinstance(then, Shard) else "all_gather"
    if isinstance(now, Replicate):
        return "slice" if isinstance(then, Shard) else "mask"
    if isinstance(then, Partial):
        return ""
    if isinstance(then, Shard):
        segmented = any(isinstance(p, Shard) and p.segments for p in (then, *placements))
        return "" if segmented else "reduce_scatter"
    return "all_reduce"


def _check(src: TensorSpec, dst: TensorSpec) -> None:
    """Refuse what no step can do."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise PlacementError(
            f"A redistribution keeps shape and dtype, but {src} was to become {dst}. Reshape or cast before or after."
        )
    for p in {*src.placements, *dst.placements}:
        if isinstance(p, Partial) and not reducible(p.reduce_op, src.dtype):
            raise PlacementError(
                f"{p!r} of {src.dtype}: this dtype cannot be reduced by {p.reduce_op!r}. Use Replicate() or Shard(dim)."
            )


def reducible(reduce_op: str, dtype: torch.dtype) -> bool:
    """Whether the reduction is defined: complex numbers have no order, torch neither compares nor divides uint64."""
    if reduce_op in ("max", "min"):
        return not dtype.is_complex and dtype != torch.uint64
    if reduce_op == "avg":
        return dtype != torch.uint64
    return reduce_op == "product" or dtype != torch.float8_e8m0fnu  # which has no zero


def _same_layout(src: TensorSpec, dst: TensorSpec) -> bool:
    """Whether every local tensor has the same strides under both specs, which differ in theirs only."""
    return all(
        dense_strides(shape, src.shape, src.stride) == dense_strides(shape, dst.shape, dst.stride)
        for shape in {src.local_shape(position) for position in range(src.mesh.size)}
    )


# ---------------------------------------------------------------------------------------------------- costs


def step_bytes(step: Step) -> int:
    """Bytes that cross between devices, summed over all devices.

    With V the bytes of what a group of n devices holds together (its shards, or one term), per group: all-gather
    (n-1)V, reduce-scatter (n-1)V, ring all-reduce 2(n-1)V (each device sends 2(n-1)/n of V), all-to-all (n-1)/n V,
    slice and mask 0. A move: what every target device wants and does not hold itself.
    """
    if step.kind == "move":
        return _move_bytes(step.src, step.dst)
    return _axis_bytes(step.kind, step.axis, step.src.placements, step.src.mesh, step.src.nbytes)


def _axis_bytes(kind: str, axis: int, placements: Sequence[Placement], mesh: MeshLayout, nbytes: int) -> int:
    """`step_bytes` of a step along one axis."""
    if kind in ("slice", "mask"):
        return 0
    n = mesh.shape[axis]
    # The groups that the other axes cut hold the tensor once together, all others hold copies (or terms) of it.
    volume = nbytes * prod(
        size for b, size in enumerate(mesh.shape) if b != axis and not isinstance(placements[b], Shard)
    )
    if kind == "all_to_all":
        return volume * (n - 1) // n
    return volume * (n - 1) * (2 if kind == "all_reduce" else 1)


def _move_bytes(src: TensorSpec, dst: TensorSpec) -> int:
    """`step_bytes` of a move between specs without partial axes."""
    at = {device: position for position, device in enumerate(src.mesh.devices)}
    missing = 0
    for position, device in enumerate(dst.mesh.devices):
        missing += prod(dst.local_shape(position))
        if device in at:
            missing -= sum(prod(box_shape(box)) for box in common_boxes(dst, position, src, at[device]))
    return missing * src.dtype.itemsize


def _latency(kind: str, mesh: MeshLayout, other: MeshLayout | None = None) -> float:
    """The fixed part of a step's price."""
    if kind in ("slice", "mask"):
        return LOCAL_COST
    steps, size = 1, mesh.size
    if other is not None:
        steps, size = max(mesh.ndim, other.ndim, 1), max(mesh.size, other.size)
    return float(LATENCY_BYTES * size * steps)


@lru_cache(maxsize=65536)
def cost(src: TensorSpec, dst: TensorSpec) -> float:
    """About what `plan_steps` would pay (bytes, latency included), without searching: for choosing between placements.

    Sums the collective of every axis that changes, as if the axes did not touch each other.
    """
    mesh = src.mesh
    if mesh is not dst.mesh and mesh != dst.mesh:
        reduce = sum(
            _axis_bytes("reduce_scatter", axis, src.placements, mesh, src.nbytes) + _latency("reduce_scatter", mesh)
            for axis, p in enumerate(src.placements)
            if isinstance(p, Partial)
        )
        copies = prod(n for p, n in zip(dst.placements, dst.mesh.shape, strict=True) if not isinstance(p, Shard))
        return reduce + float(src.nbytes * copies) + _latency("move", mesh, dst.mesh)
    now, total = list(src.placements), 0.0
    changed = [a for a, p in enumerate(dst.placements) if p != now[a]]
    # Axes that cut the tensor come first: what follows handles less.
    for axis in sorted(changed, key=lambda a: not isinstance(dst.placements[a], Shard)):
        then = dst.placements[axis]
        kind = step_kind((now[axis],), 0, then)
        kinds = (kind,) if kind else ("all_reduce" if isinstance(now[axis], Partial) else "all_gather", "mask")
        for k in kinds:
            total += _axis_bytes(k, axis, now, mesh, src.nbytes) + _latency(k, mesh)
        now[axis] = then
    return total
