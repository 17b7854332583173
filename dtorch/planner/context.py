"""Operators in which devices exchange more than placements tell: attention along sequences, convolutions along space.

Attention whose sequence is cut along an axis named ``ulysses_cp`` or ``ring_cp``:

On a ``ulysses_cp`` axis the heads are cut instead of the sequence for the time of the operator: one all-to-all for each
of query, key and value, one back for the result. (Jacobs et al., DeepSpeed Ulysses, 2023.)
On a ``ring_cp`` axis nothing is moved beforehand; blocks of keys and values go round, N - 1 sends each, and a kernel
combines what each block gives by its logarithm of sums. (Liu et al., Ring Attention, 2023.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from dtorch.core.placements import REPLICATE, Partial, Placement, Shard
from dtorch.core.spec import MeshLayout, TensorSpec, dense_strides
from dtorch.core.steps import Step
from dtorch.planner.rule import Label, Labels, Rule


def mode(rule: Rule, specs: Sequence[TensorSpec], mesh: MeshLayout, axis: int, rings: int) -> str:
    """``"ulysses"`` or ``"ring"`` when the axis is of that kind and cuts the query's rows, ``"halo"`` when it cuts what
    has one, else ``""``. An operator has a halo along one axis at most."""
    if rule.halo is not None and not rings and _has_halo(rule.halo, specs[0], axis):
        return "halo"
    if not rule.sequence:
        return ""
    rows = rule.inputs[0].index(rule.sequence[0])
    if not specs[0].placements[axis].is_shard(rows):
        return ""
    kind = mesh.kind(axis)
    if kind == "ulysses_cp" and rule.heads is not None:
        return "ulysses"
    return "ring" if kind == "ring_cp" and rule.ring else ""


_Placed = tuple[list[Placement], list[Placement], list[Placement], Label]


def placements(mode: str, rule: Rule, specs: Sequence[TensorSpec], axis: int) -> _Placed:
    """Placements on the axis of slots, of results, and of results as the operator makes them; and the label cut."""
    if mode == "halo":
        assert rule.halo is not None
        here = Shard(rule.halo[0])
        outs: list[Placement] = [here if i == 0 else REPLICATE for i in range(len(rule.outputs))]
        return [here if i == 0 else REPLICATE for i in range(len(specs))], outs, outs, ("halo", rule.halo)
    cuts = _cuts(rule, specs, axis)
    outs = [_cut(labels, rule.sequence, cuts) for labels in rule.outputs]
    if mode == "ring":
        return [_cut(labels, rule.sequence, cuts) for labels in rule.inputs], outs, outs, rule.sequence[0]
    heads = (rule.heads,)
    made: list[Placement] = []
    for labels in rule.outputs:
        whole = rule.heads in rule.reduce and rule.heads not in labels
        made.append(Partial(rule.reduce[rule.heads]) if whole else _cut(labels, heads, {}))
    return [_cut(labels, heads, {}) for labels in rule.inputs], outs, made, rule.heads


def _cuts(rule: Rule, specs: Sequence[TensorSpec], axis: int) -> dict[Label, Shard]:
    """How the axis cuts the sequence dimensions: rows as the query's, columns as the key's, whatever segments they have."""
    found: dict[Label, Shard] = {}
    for labels, spec in zip(rule.inputs, specs, strict=True):
        p = spec.placements[axis]
        if isinstance(p, Shard) and labels[p.dim] in rule.sequence:
            found.setdefault(labels[p.dim], p)
    return found


def _cut(labels: Labels, wanted: Sequence[Label], cuts: Mapping[Label, Shard]) -> Placement:
    found = ((d, label) for d, label in enumerate(labels) if label is not None and label in wanted)
    return next((cuts.get(label, Shard(d)).along(d) for d, label in found), REPLICATE)


def _has_halo(halo: tuple[int, int], spec: TensorSpec, axis: int) -> bool:
    """Whether the axis alone cuts the dimension, in order and so that every piece can give its neighbours enough."""
    (dim, width), parts = halo, spec.mesh.shape[axis]
    if spec.placements[axis] != Shard(dim) or spec.shards_of(dim) != parts:
        return False
    smallest = spec.shape[dim] - (parts - 1) * -(-spec.shape[dim] // parts)
    return smallest >= max(width, 1)


def halo_rounds(spec: TensorSpec, halo: tuple[int, int], axis: int) -> tuple[tuple[tuple[int, Step], ...], ...]:
    """Two sends: every device gets the first rows of the next one, and the last rows of the one before."""
    dim, width = halo
    mesh = spec.mesh
    shape = tuple(width * mesh.shape[axis] if d == dim else n for d, n in enumerate(spec.shape))
    edge = TensorSpec(mesh, spec.placements, shape, dense_strides(shape, spec.shape, spec.stride), spec.dtype)
    steps = (Step("move", -1, edge, edge.replace(mesh=mesh.rolled(axis, shift))) for shift in (mesh.shape[axis] - 1, 1))
    return tuple(((0, step),) for step in steps)


def rounds(
    specs: Sequence[TensorSpec], slots: Sequence[int], axes: Sequence[int]
) -> tuple[tuple[tuple[int, Step], ...], ...]:
    """The sends of a ring: each brings every device the block of another one; the last brings all home.

    Args:
        specs: of the slots as the kernel gets them.
        slots: those that go round (keys and values).
        axes: the ring's mesh axes; over several, blocks go round along the last for each step along those before.
    """
    mesh = specs[slots[0]].mesh
    layouts = []
    for shifts in product(*(range(mesh.shape[axis]) for axis in axes)):
        layout = mesh
        for axis, shift in zip(axes, shifts, strict=True):
            layout = layout.rolled(axis, shift)
        layouts.append(layout)
    out = []
    for here, there in pairwise((*layouts, mesh)):
        moves = ((slot, specs[slot].replace(mesh=here), specs[slot].replace(mesh=there)) for slot in slots)
        out.append(tuple((slot, Step("move", -1, src, dst)) for slot, src, dst in moves))
    return tuple(out)
