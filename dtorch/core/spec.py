"""What is known of a distributed tensor without its data, and which part of it each device holds.

A device's piece is given by spans: for each tensor dimension the intervals ``[start, stop)`` of global coordinates that
lie one after the other in it. There is one interval, and the piece is a box, unless the dimension is cut in segments.
Everything that must know local shapes (planner, workers, redistribution, the client when it assembles a value) asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from dtorch.core.errors import PlacementError
from dtorch.core.placements import Partial, Placement, Replicate, Shard

Span = tuple[int, int]
Box = tuple[Span, ...]

# Ids of rolled layouts start here, beyond those of meshes that the user makes.
ROLLED = 1 << 20


class Interned(type):
    """Values made from equal arguments are one object: comparing and hashing them is comparing identities."""

    _made: dict[Any, Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            names = [f.name for f in fields(cls)][len(args) :]  # type: ignore[arg-type]
            args = (*args, *(kwargs[n] for n in names))
        try:
            return cls._made[args]
        except KeyError:
            return cls._made.setdefault(args, super().__call__(*args))
        except AttributeError:
            cls._made = {}
            return cls(*args)


@dataclass(frozen=True, eq=False)
class MeshLayout(metaclass=Interned):
    """The devices of a mesh as plain values: what planner and workers need of it. Equal layouts are one object.

    Attributes:
        id: number of the mesh within its session, the index of its torch device.
        shape: number of devices along each axis.
        devices: global device numbers in row-major order of ``shape``.
        kinds: what each axis is for, by its name ("ring_cp", ...; "" without a name); workers do without.
        session: number of the session within the client, so that tensors of two sessions do not pass for each other's.
    """

    id: int
    shape: tuple[int, ...]
    devices: tuple[int, ...]
    kinds: tuple[str, ...] = ()
    session: int = 0

    def kind(self, axis: int) -> str:
        """What an axis is for."""
        return self.kinds[axis] if self.kinds else ""

    def rolled(self, axis: int, shift: int) -> MeshLayout:
        """The layout in which each device stands where its ``shift``-th predecessor along the axis stands in this one.

        A tensor placed alike on both lies, on the rolled one, ``shift`` devices further: a ring's step is a move
        between them.
        """
        n = self.shape[axis]
        if shift % n == 0:
            return self
        stride = 1
        for size in self.shape[axis + 1 :]:
            stride *= size
        devices = list(self.devices)
        for position, c in enumerate(self.coordinates):
            source = position + ((c[axis] + shift) % n - c[axis]) * stride
            devices[position] = self.devices[source]
        number = ROLLED + (self.id * 16 + axis) * 1024 + shift % n
        return MeshLayout(number, self.shape, tuple(devices), self.kinds, self.session)

    @property
    def ndim(self) -> int:
        """Number of mesh axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Coordinate on each axis of the device at this row-major position."""
        out = []
        for n in reversed(self.shape):
            out.append(position % n)
            position //= n
        return tuple(reversed(out))

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Coordinates of all devices, in row-major order."""
        return tuple(self.coordinate(i) for i in range(self.size))

    @cache  # noqa: B019  (layouts live as long as their session)
    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """Positions of the devices that differ only in their coordinate on this axis, group by group."""
        found: dict[tuple[int, ...], list[int]] = {}
        for position, c in enumerate(self.coordinates):
            found.setdefault(c[:axis] + c[axis + 1 :], []).append(position)
        return tuple(tuple(g) for g in found.values())


def chunk(start: int, stop: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """The ``index``-th of ``parts`` pieces of ``[start, stop)``, each ``ceil(length / parts)`` long, the last ones short;
    of units, where some indices stay together."""
    step = -((start - stop) // (parts * unit)) * unit
    low = min(start + index * step, stop)
    return low, min(low + step, stop)


def local_spans(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[Span, ...], ...]:
    """The spans that the device at ``coordinate`` holds; axes cut in order, so nested shards of one dimension nest."""
    spans: list[tuple[Span, ...]] = [((0, n),) for n in shape]
    for p, parts, index in zip(placements, mesh_shape, coordinate, strict=True):
        if not isinstance(p, Shard):
            continue
        if not p.segments:
            length = sum(b - a for a, b in spans[p.dim])
            spans[p.dim] = _within(spans[p.dim], *chunk(0, length, parts, index, p.unit))
            continue
        found: list[Span] = []
        for n, (start, stop) in zip(p.segments, pairwise(accumulate(map(abs, p.segments), initial=0)), strict=True):
            mine = tuple((max(a, start), min(b, stop)) for a, b in spans[p.dim] if max(a, start) < min(b, stop))
            low, high = chunk(0, sum(b - a for a, b in mine), parts, index if n > 0 else parts - 1 - index, p.unit)
            found.extend(_within(mine, low, high) if low < high else ())
        spans[p.dim] = _joined(found) or ((shape[p.dim], shape[p.dim]),)
    return tuple(spans)


def _within(spans: Sequence[Span], low: int, high: int) -> tuple[Span, ...]:
    """What lies between two places of the sequence that the spans form together."""
    found, at = [], 0
    for a, b in spans:
        start, stop = max(a, a + low - at), min(b, a + high - at)
        if start < stop:
            found.append((start, stop))
        at += b - a
    return tuple(found) or ((spans[-1][1],) * 2,)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Spans that touch as one."""
    out: list[Span] = []
    for a, b in spans:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return tuple(out)


def box_shape(box: Box) -> tuple[int, ...]:
    """Size of a box along each dimension."""
    return tuple(b - a for a, b in box)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, as torch gives them (a size of 0 counts as 1)."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def dense_strides(shape: Sequence[int], global_shape: Sequence[int], global_stride: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps for ``shape`` that keep the memory order of the global strides."""
    order = sorted(range(len(shape)), key=lambda d: (-global_stride[d], d))
    out, step = [0] * len(shape), 1
    for d in reversed(order):
        out[d] = step
        step *= max(shape[d], 1)
    same = all(a == b for n, a, b in zip(shape, out, global_stride, strict=True) if n > 1)
    if tuple(shape) == tuple(global_shape) and same:
        # Dimensions of size one keep the strides they have: kernels look at them to tell memory formats apart.
        return tuple(global_stride)
    return tuple(out)


@dataclass(frozen=True, eq=False)
class TensorSpec(metaclass=Interned):
    """Shape, strides (elements), dtype and placements of one distributed tensor on one mesh. Equal specs are one object.

    Raises:
        PlacementError: segments that are not of the dimension's size.
    """

    mesh: MeshLayout
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for p in self.placements:
            if isinstance(p, Shard) and p.segments and sum(map(abs, p.segments)) != self.shape[p.dim]:
                raise PlacementError(
                    f"{p} of a tensor of shape {self.shape}: the segments' lengths must add up to the size of the "
                    f"dimension, {self.shape[p.dim]}."
                )

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @cached_property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor's elements."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return all(isinstance(p, Replicate) for p in self.placements)

    @cached_property
    def has_partial(self) -> bool:
        """Whether some axis still has to be reduced."""
        return any(isinstance(p, Partial) for p in self.placements)

    @cached_property
    def is_dense(self) -> bool:
        """Whether the elements fill their memory without gaps or overlaps, in some order of the dimensions."""
        wanted = dense_strides(self.shape, self.shape, self.stride)
        return all(n == 1 or a == b for n, a, b in zip(self.shape, self.stride, wanted, strict=True))

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the global strides are row-major."""
        want = contiguous_strides(self.shape)
        return self.numel == 0 or all(n <= 1 or a == b for n, a, b in zip(self.shape, self.stride, want, strict=True))

    def spans(self, position: int) -> tuple[tuple[Span, ...], ...]:
        """What the device at this position of the mesh holds of each dimension, in the order in which it lies there."""
        return local_spans(self.shape, self.placements, self.mesh.shape, self.mesh.coordinates[position])

    def box(self, position: int) -> Box:
        """The part held by the device at this position of the mesh.

        Raises:
            PlacementError: it is no box, but cut in segments.
        """
        spans = self.spans(position)
        if any(len(s) > 1 for s in spans):
            raise PlacementError(f"{self} is cut in segments, so no device has one box of it.")
        return tuple(s[0] for s in spans)

    def parts(self, position: int) -> list[tuple[Box, Box]]:
        """The boxes that the device holds: in global coordinates, and where they lie in its piece."""
        dims = []
        for spans in self.spans(position):
            places = pairwise(accumulate((b - a for a, b in spans), initial=0))
            dims.append(list(zip(spans, places, strict=True)))
        return [(tuple(g for g, _ in part), tuple(here for _, here in part)) for part in product(*dims)]

    def local_shape(self, position: int) -> tuple[int, ...]:
        """Shape of the device's piece."""
        return tuple(sum(b - a for a, b in spans) for spans in self.spans(position))

    @cached_property
    def is_segmented(self) -> bool:
        """Whether some axis cuts a dimension in segments."""
        return any(isinstance(p, Shard) and bool(p.segments) for p in self.placements)

    def shards_of(self, dim: int) -> int:
        """Number of pieces into which a tensor dimension is cut."""
        n = 1
        for p, size in zip(self.placements, self.mesh.shape, strict=True):
            if isinstance(p, Shard) and p.dim == dim:
                n *= size
        return n

    def replace(
        self,
        placements: tuple[Placement, ...] | None = None,
        mesh: MeshLayout | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> TensorSpec:
        """The same tensor with other placements, mesh or strides."""
        return TensorSpec(
            mesh or self.mesh,
            self.placements if placements is None else placements,
            self.shape,
            self.stride if stride is None else stride,
            self.dtype,
        )

    def __str__(self) -> str:
        where = ", ".join(map(str, self.placements))
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} [{where}]"
