"""Context parallelism: attention whose sequence is cut along an axis named ``ulysses_cp`` or ``ring_cp``.

On a ``ulysses_cp`` axis the heads are cut instead of the sequence for the time of the operator: one all-to-all for each
of query, key and value, one back for the result. (Jacobs et al., DeepSpeed Ulysses, 2023.)
On a ``ring_cp`` axis nothing is moved beforehand; blocks of keys and values go round, N - 1 sends each, and a kernel
combines what each block gives by its logarithm of sums. (Liu et al., Ring Attention, 2023.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtorch.core.placements import REPLICATE, Placement, Shard
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.core.steps import Step
from dtorch.planner.rule import Label, Labels, Rule


def mode(rule: Rule, specs: Sequence[TensorSpec], mesh: MeshLayout, axis: int, rings: int) -> str:
    """``"ulysses"`` or ``"ring"`` when the axis is of that kind and cuts the query's rows, else ``""``."""
    if not rule.sequence:
        return ""
    rows = rule.inputs[0].index(rule.sequence[0])
    if not specs[0].placements[axis].is_shard(rows):
        return ""
    kind = mesh.kind(axis)
    if kind == "ulysses_cp" and rule.heads is not None:
        return "ulysses"
    return "ring" if kind == "ring_cp" and rule.ring and not rings else ""


def segments(rule: Rule, specs: Sequence[TensorSpec], axis: int) -> dict[Label, tuple[int, ...]]:
    """How the axis cuts the sequence dimensions: rows as the query's, columns as the key's, whatever segments they have."""
    found: dict[Label, tuple[int, ...]] = {}
    for labels, spec in zip(rule.inputs, specs, strict=True):
        p = spec.placements[axis]
        if isinstance(p, Shard) and labels[p.dim] in rule.sequence:
            found.setdefault(labels[p.dim], p.segments)
    return found


def along_sequence(rule: Rule, labels: Labels, cuts: Mapping[Label, tuple[int, ...]]) -> Placement:
    """Cut the sequence dimension of a tensor, if it has one, as ``segments`` says."""
    return _cut(labels, rule.sequence, cuts)


def along_heads(rule: Rule, labels: Labels) -> Placement:
    """Cut the heads of a tensor, if it has them."""
    return _cut(labels, (rule.heads,), {})


def _cut(labels: Labels, wanted: Sequence[Label], cuts: Mapping[Label, tuple[int, ...]]) -> Placement:
    found = ((d, label) for d, label in enumerate(labels) if label is not None and label in wanted)
    return next((Shard(d, cuts.get(label, ())) for d, label in found), REPLICATE)


def rounds(specs: Sequence[TensorSpec], slots: Sequence[int], axis: int) -> tuple[tuple[tuple[int, Step], ...], ...]:
    """The sends of a ring: round r brings every device the block of the r-th next; the last round brings all home.

    Args:
        specs: of the slots as the kernel gets them.
        slots: those that go round (keys and values).
        axis: the ring's mesh axis.
    """
    out = []
    for r in range(specs[slots[0]].mesh.shape[axis]):
        row = []
        for slot in slots:
            spec = specs[slot]
            here, there = spec.mesh.rolled(axis, r), spec.mesh.rolled(axis, r + 1)
            row.append((slot, Step("move", -1, spec.replace(mesh=here), spec.replace(mesh=there))))
        out.append(tuple(row))
    return tuple(out)
