"""How one mesh axis treats a tensor: ``Shard(dim)``, ``Replicate()`` or ``Partial(reduce_op)``.

The classes carry the names and the meaning of ``torch.distributed.tensor``'s and compare equal to them, but are
plain frozen values: importing torch's costs 0.7 s, which every ``import dtorch`` would pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtorch.core.errors import PlacementError, refuse

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


class Placement:
    """Base of the three placements."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a ``Shard`` (of tensor dimension ``dim``, when given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether every device of the axis holds the whole tensor."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the devices of the axis hold terms that are still to be reduced (by ``reduce_op``, when given)."""
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The tensor is cut along dimension ``dim`` in pieces of ``ceil(size / devices)``; the last may be short or empty.

    Args:
        dim: the tensor dimension.
        segments: lengths of consecutive parts of the dimension that are cut each for itself, so that every device has
            its piece of each: what ``cat`` makes of sharded tensors without moving anything. The pieces of a negative
            length go to the devices in reverse order: ``(n, -n)`` gives every device as many early as late indices.
        unit: so many consecutive indices stay together, as the features of an attention head do: the pieces are as many
            units as those of a dimension that has one index for each.
    """

    dim: int
    segments: tuple[int, ...] = ()
    unit: int = 1

    def __post_init__(self) -> None:
        if not all(isinstance(n, int) for n in (self.dim, self.unit, *self.segments)):
            raise PlacementError(f"Shard({self.dim!r}): a dimension, lengths of segments and a unit are whole numbers.")
        if self.unit < 1:
            raise PlacementError(f"Shard({self.dim}, unit={self.unit}): a unit is at least 1 index.")
        segments = tuple(n for n in self.segments if n)
        object.__setattr__(self, "segments", () if len(segments) == 1 and segments[0] > 0 else segments)

    def __eq__(self, other: object) -> bool:
        return (
            type(other).__name__ == "Shard"
            and getattr(other, "dim", None) == self.dim
            and getattr(other, "segments", ()) == self.segments
            and getattr(other, "unit", 1) == self.unit
        )

    def __hash__(self) -> int:
        return hash(("Shard", self.dim, self.segments, self.unit))

    def __repr__(self) -> str:
        segments = f", segments={self.segments}" if self.segments else ""
        return f"Shard(dim={self.dim}{segments}{f', unit={self.unit}' if self.unit > 1 else ''})"

    def along(self, dim: int) -> Shard:
        """Another dimension cut as this one is."""
        return Shard(dim, self.segments, self.unit)


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every device of the axis holds the whole tensor."""

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "Replicate"

    def __hash__(self) -> int:
        return hash("Replicate")

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every device of the axis holds a term of full size; the value is their reduction by ``reduce_op``."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(f"Partial({self.reduce_op!r}): the reduction must be one of {', '.join(REDUCE_OPS)}.")

    def __eq__(self, other: object) -> bool:
        return type(other).__name__ == "Partial" and getattr(other, "reduce_op", None) == self.reduce_op

    def __hash__(self) -> int:
        return hash(("Partial", self.reduce_op))

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"


REPLICATE = Replicate()


def as_placement(value: object) -> Placement:
    """Our value of a placement given as ours or as one of torch.distributed.tensor's.

    Raises:
        PlacementError: it is neither.
    """
    if isinstance(value, Placement):
        return value
    name = type(value).__name__
    if name == "Shard":
        return Shard(int(value.dim))  # type: ignore[attr-defined]
    if name == "Replicate":
        return REPLICATE
    if name == "Partial":
        return Partial(str(value.reduce_op))  # type: ignore[attr-defined]
    raise PlacementError(
        f"{value!r} is not a placement. Use dtorch.Shard(dim), dtorch.Replicate() or dtorch.Partial()."
    )


def normalize(placements: Iterable[object] | None, mesh_ndim: int, tensor_ndim: int) -> tuple[Placement, ...]:
    """Checked placements with non-negative dimensions, one per mesh axis; ``None`` replicates on every axis.

    Raises:
        PlacementError: wrong number of placements, or a dimension that the tensor does not have; all faults at once.
    """
    if placements is None:
        return (REPLICATE,) * mesh_ndim
    if isinstance(placements, Placement) or not isinstance(placements, Iterable):
        raise PlacementError(f"placements={placements!r} must be a list with one placement per mesh axis.")
    values, faults = list(placements), []
    if len(values) != mesh_ndim:
        faults.append(
            f"{len(values)} placements {values} for a mesh of {mesh_ndim} axes: give one placement per mesh axis."
        )
    given: list[Placement] = []
    for axis, value in enumerate(values):
        try:
            given.append(_inside(as_placement(value), axis, tensor_ndim))
        except PlacementError as e:
            faults.append(str(e))
    refuse(faults)
    return tuple(given)


def _inside(p: Placement, axis: int, ndim: int) -> Placement:
    """The placement with a non-negative dimension."""
    if not isinstance(p, Shard):
        return p
    if -ndim <= p.dim < ndim:
        return p.along(p.dim % ndim)
    known = f"so the dimension must lie in [{-ndim}, {ndim - 1}]." if ndim else "use Replicate()."
    raise PlacementError(f"Shard({p.dim}) on mesh axis {axis}: the tensor has {ndim} dimensions, {known}")
