"""Choose the cheapest legal placements for a rule, one mesh axis after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtorch.core.placements import REPLICATE, Partial, Placement, Replicate, Shard
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.planner import context
from dtorch.planner.rule import Label, Labels, Rule
from dtorch.planner.segments import fold_candidates, how_cut, joined_candidate, unit_candidates

# Relative cost of a local slice or mask against moving the same bytes between devices.
_LOCAL = 0.02
_ILLEGAL = float("inf")
_PLAIN = Shard(0)


_Candidate = tuple[list[Placement], list[Placement], Label]


@dataclass(frozen=True)
class Choice:
    """Placements of every slot and result.

    Attributes:
        cut: labels that some axis shards.
        made: placements of the results as the operator makes them, where they differ from ``outputs``.
        rings: mesh axes along which blocks go round, or the one along which borders are exchanged.
    """

    inputs: tuple[tuple[Placement, ...], ...]
    outputs: tuple[tuple[Placement, ...], ...]
    cut: frozenset[Label]
    made: tuple[tuple[Placement, ...], ...] | None = None
    rings: tuple[int, ...] = ()


def choose(
    rule: Rule,
    specs: Sequence[TensorSpec],
    mesh: MeshLayout,
    sizes: dict[Label, int],
    written: frozenset[int],
    same: Mapping[int, int],
) -> Choice:
    """The cheapest placements.

    Args:
        rule: labels of the call.
        specs: current specs of the tensor slots.
        mesh: the mesh of all of them.
        sizes: size of each label.
        written: slots that the operator writes: moving one costs the way back as well.
        same: for a result that is a written argument, its slot: both have one placement, so none may become Partial
            that was not.
    """
    if rule.entries:
        return _choose_entries(rule, specs, mesh, sizes, written)
    ins: list[list[Placement]] = [[] for _ in specs]
    outs: list[list[Placement]] = [[] for _ in rule.outputs]
    made: list[list[Placement]] = [[] for _ in rule.outputs]
    rings: list[int] = []
    cut: dict[Label, int] = {}
    for axis, parts in enumerate(mesh.shape):
        current = [s.placements[axis] for s in specs]
        mode = context.mode(rule, specs, mesh, axis, len(rings))
        if mode:
            wanted_in, wanted_out, made_out, label = context.placements(mode, rule, specs, axis)
            if mode != "ulysses":
                rings.append(axis)
        else:
            costs = _Costs(rule, specs, current, parts, written)
            candidates = _candidates(rule, current, sizes, cut, parts)
            wanted_in, wanted_out, label = costs.cheapest(candidates, same)
            made_out = wanted_out
        if label is not None:
            cut[label] = cut.get(label, 1) * parts
        for row, p in zip((*ins, *outs, *made), (*wanted_in, *wanted_out, *made_out), strict=True):
            row.append(p)
    outputs, as_made = tuple(map(tuple, outs)), tuple(map(tuple, made))
    return Choice(tuple(map(tuple, ins)), outputs, frozenset(cut), None if as_made == outputs else as_made, tuple(rings))


@dataclass(frozen=True)
class _Costs:
    """What it costs to bring the slots from where they are on one mesh axis."""

    rule: Rule
    specs: Sequence[TensorSpec]
    current: Sequence[Placement]
    parts: int
    written: frozenset[int]

    def cheapest(self, candidates: Sequence[_Candidate], same: Mapping[int, int]) -> _Candidate:
        """The first of the cheapest, with unread slots left where they are."""
        best_cost, best = _ILLEGAL, None
        for candidate in candidates:
            if any(candidate[0][slot] != candidate[1][i] for i, slot in same.items()):
                continue
            cost = 0.0
            for slot, (spec, have, want) in enumerate(zip(self.specs, self.current, candidate[0], strict=True)):
                if slot in self.rule.unused:
                    candidate[0][slot] = have
                    continue
                move = _move_cost(spec, have, want, self.parts, self.current, self.rule)
                cost += 2 * move if slot in self.written else move
            if cost < best_cost:
                best_cost, best = cost, candidate
        assert best is not None, "replicating every input is always a candidate"
        return best


def _choose_entries(
    rule: Rule, specs: Sequence[TensorSpec], mesh: MeshLayout, sizes: dict[Label, int], written: frozenset[int]
) -> Choice:
    """Each entry of the lists by itself; tensors that belong to all entries are whole."""
    whole: tuple[Placement, ...] = (REPLICATE,) * mesh.ndim
    ins, outs = [whole for _ in specs], [whole for _ in rule.outputs]
    cut: frozenset[Label] = frozenset()
    for slots, results in rule.entries:
        part = Rule([rule.inputs[s] for s in slots], [rule.outputs[i] for i in results], reduce=rule.reduce)
        local = frozenset(k for k, s in enumerate(slots) if s in written)
        choice = choose(part, [specs[s] for s in slots], mesh, sizes, local, {})
        for s, placements in zip(slots, choice.inputs, strict=True):
            ins[s] = placements
        for i, placements in zip(results, choice.outputs, strict=True):
            outs[i] = placements
        cut |= choice.cut
    return Choice(tuple(ins), tuple(outs), cut)


def _candidates(
    rule: Rule, current: Sequence[Placement], sizes: dict[Label, int], cut: dict[Label, int], parts: int
) -> list[_Candidate]:
    found: list[_Candidate] = []
    # Labels that an input is cut along come first, so that ties keep the first sharded input where it is.
    present: dict[tuple[Label, Shard], None] = {}
    for labels, p in zip(rule.inputs, current, strict=True):
        if isinstance(p, Shard) and labels[p.dim] not in (None, rule.joined):
            present.setdefault((labels[p.dim], how_cut(rule, labels[p.dim], p)))
    for label, how in present:
        if ("unit", label) not in cut and _divides(rule, label, sizes, cut.get(label, 1) * parts):
            found.extend(_cut_candidate(rule, label, how))
    joined = joined_candidate(rule, current, parts) if rule.joined is not None else None
    if joined is not None:
        found.append(joined)
    if rule.folds:
        found.extend(fold_candidates(rule, current[0], parts))
    if rule.scales:
        found.extend(unit_candidates(rule, current[0], parts, cut))
    for slots in rule.linear:
        # Only when all of them wait already: hiding a whole tensor behind a mask would delay the reduction for nothing.
        ops = {p.reduce_op if isinstance((p := current[slot]), Partial) else "" for slot in slots}
        if len(ops) == 1 and ops <= set(rule.linear_ops):
            p = Partial(ops.pop())
            found.append(
                ([p if s in slots else REPLICATE for s in range(len(current))], [p for _ in rule.outputs], None)
            )
    found.append(([REPLICATE] * len(rule.inputs), [REPLICATE] * len(rule.outputs), None))
    return found


def legal(rule: Rule, sizes: dict[Label, int], parts: int) -> list[tuple[list[Placement], list[Placement]]]:
    """All placements of slots and results that a rule allows on one mesh axis of ``parts`` devices."""
    labels = [label for label in rule.labels if label != rule.joined and _divides(rule, label, sizes, parts)]
    found = [c for label in labels for c in _cut_candidate(rule, label)]
    for slots in rule.linear:
        term = Partial(rule.linear_ops[0])
        ins: list[Placement] = [term if s in slots else REPLICATE for s in range(len(rule.inputs))]
        found.append((ins, [term for _ in rule.outputs], None))
    found.append(([REPLICATE] * len(rule.inputs), [REPLICATE] * len(rule.outputs), None))
    return [(ins, outs) for ins, outs, _ in found]


def _divides(rule: Rule, label: Label, sizes: dict[Label, int], shards: int) -> bool:
    """Whether a label may be cut into so many pieces."""
    if label in rule.even and sizes[label] % shards:
        return False
    return label not in rule.units or rule.units[label] % shards == 0


def _cut_candidate(rule: Rule, label: Label, how: Shard = _PLAIN) -> list[_Candidate]:
    def place(labels: Labels) -> Placement | None:
        return how.along(labels.index(label)) if label in labels else None

    ins = [place(labels) or REPLICATE for labels in rule.inputs]
    outs: list[Placement] = []
    for i, labels in enumerate(rule.outputs):
        p = place(labels)
        if p is None and i in rule.whole:
            p = REPLICATE
        if p is None and label in rule.reduce:
            p = Partial(rule.reduce[label])
        if p is None:
            return []
        outs.append(p)
    return [(ins, outs, label)]


def _move_cost(
    spec: TensorSpec, have: Placement, want: Placement, parts: int, current: Sequence[Placement], rule: Rule
) -> float:
    """Bytes that cross between devices to change one axis, per tensor; local work counts a little."""
    if have == want:
        return 0.0
    n = max(spec.nbytes, 1)
    share = (parts - 1) / parts
    if isinstance(have, Replicate):
        return _LOCAL * n + 0.01
    if isinstance(have, Shard):
        return n * share + 1 if isinstance(want, Replicate) else n * share / parts + 1.5
    if isinstance(want, Replicate):
        return 2 * n * share + 1
    if isinstance(want, Shard):
        # Reduce-scatter only where another tensor is already cut that way; otherwise results would be resharded
        # behind the user's back.
        return n * share + 1
    return 4 * n
