"""Steps of a redistribution, and which device gives which box to which other: shared by the planner and the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dtorch.core.placements import Partial, Replicate
from dtorch.core.spec import Box, TensorSpec, dense_strides

ROWS = 2
"""The dimension of images (samples, channels, rows, ...) along which neighbours exchange borders."""

REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Step:
    """One collective, run by every worker that hosts a device of either mesh.

    Attributes:
        kind: "slice" and "mask" are local; "all_gather", "all_reduce", "reduce_scatter" and "all_to_all" work along one
            mesh axis; "move" fetches every box from wherever it is.
        axis: the mesh axis it works along; -1 for "move".
        src: the tensor before.
        dst: the tensor after; that of the last step is the wanted one.
    """

    kind: str
    axis: int
    src: TensorSpec
    dst: TensorSpec

    def __str__(self) -> str:
        where = f" along mesh axis {self.axis}" if self.axis >= 0 else ""
        return f"{self.kind}{where} of {self.src} to {self.dst}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box (global coordinates) that position ``source`` of the source mesh gives to ``target`` of the other."""

    source: int
    target: int
    box: Box


def memory_order(spec: TensorSpec) -> tuple[int, ...]:
    """Tensor dimensions from the outermost in memory to the innermost, as every local tensor of the spec has them."""
    stride = dense_strides((2,) * spec.ndim, spec.shape, spec.stride)
    return tuple(sorted(range(spec.ndim), key=lambda d: -stride[d]))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, ``None`` when it has no elements."""
    out = []
    for (a0, a1), (b0, b1) in zip(a, b, strict=True):
        low, high = max(a0, b0), min(a1, b1)
        if low >= high:
            return None
        out.append((low, high))
    return tuple(out)


def common_boxes(a: TensorSpec, at: int, b: TensorSpec, there: int) -> list[Box]:
    """What a device of one spec and a device of another both hold; each box lies in one part of either."""
    found = (intersect(x, y) for (x, _), (y, _) in product(a.parts(at), b.parts(there)))
    return [box for box in found if box is not None]


def transfers(
    step: Step,
    sources: Sequence[int],
    targets: Sequence[int],
    near: Callable[[int, int], bool] = lambda source, target: False,
) -> list[Transfer]:
    """Which boxes go from which of the source positions to which of the target positions; not for reductions.

    A target takes what its own device holds, then what a ``near`` source holds, else each next copy of a box in turn.
    The same for every caller that gives the same arguments.
    """
    src, dst = step.src, step.dst
    if step.kind in ("slice", "mask"):
        found = []
        for position in targets:
            if not _is_neutral(step, position):
                found += [Transfer(position, position, box) for box in common_boxes(dst, position, src, position)]
        return found
    holders: dict[Any, list[int]] = {}
    for position in sources:
        holders.setdefault(src.spans(position), []).append(position)
    turn = dict.fromkeys(holders, 0)
    found = []
    for target in targets:
        device = dst.mesh.devices[target]
        for held, positions in holders.items():
            boxes = common_boxes(dst, target, src, positions[0])
            if not boxes:
                continue
            own = [p for p in positions if src.mesh.devices[p] == device]
            choice = own or [p for p in positions if near(p, target)] or positions
            found += [Transfer(choice[turn[held] % len(choice)], target, box) for box in boxes]
            turn[held] += not own
    return found


def neutral_element(step: Step) -> float | None:
    """What a "mask" step writes where a device has no term: 0 of a sum, 1 of a product; ``None`` if all keep theirs."""
    then = step.dst.placements[step.axis] if step.kind == "mask" else None
    if not isinstance(then, Partial) or then.reduce_op not in ("sum", "product"):
        return None
    if then.reduce_op == "product":
        return 1.0
    return -0.0 if step.dst.dtype.is_floating_point or step.dst.dtype.is_complex else 0.0  # 0.0 + -0.0 loses the sign


def _is_neutral(step: Step, position: int) -> bool:
    """Whether a "mask" step leaves this device only the neutral element: all but the first along a replicated axis."""
    return (
        neutral_element(step) is not None
        and isinstance(step.src.placements[step.axis], Replicate)
        and step.src.mesh.coordinates[position][step.axis] > 0
    )
