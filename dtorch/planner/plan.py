"""A plan: all that client and workers need to run one kind of call again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.core.placements import REPLICATE, Placement, Shard
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.core.steps import Step
from dtorch.planner.call import Call, draws, is_view
from dtorch.planner.choose import Choice, choose, legal
from dtorch.planner.context import halo_rounds, rounds
from dtorch.planner.meta import NoMeta, predict
from dtorch.planner.redistribute import plan_steps
from dtorch.planner.rule import Label, NoRule, Rule, find_rule, replicated
from dtorch.planner.rules import default_rule


class OnClient(Exception):
    """Neither client nor workers can say in advance what the call returns: it runs on gathered values in the client.

    Args:
        why: for the reader of a traceback.
        by_rule: a rule says that the operator wants all its inputs whole.
    """

    def __init__(self, why: str, by_rule: bool = False) -> None:
        super().__init__(why)
        self.by_rule = by_rule


@dataclass(frozen=True)
class Result:
    """One tensor result.

    Attributes:
        spec: what the client says of it; ``None`` when only the workers can tell (see ``Plan.dynamic``).
        alias: slot of the argument that it is (written argument) or views, or ``None``.
        offset: storage offset of a view relative to its base, in elements.
        same: the result is the written argument itself.
    """

    spec: TensorSpec | None
    alias: int | None = None
    offset: int = 0
    same: bool = False


@dataclass(frozen=True)
class Plan:
    """How a call is carried out.

    Attributes:
        call: the call with specs for tensors.
        mesh: where it runs.
        moves: for a slot, the steps that bring it to the placements the operator needs.
        back: for a written slot that was moved, the steps that bring the written value home.
        reduce: slots that hold Partial values and are re-placed as reduced before the call.
        results: the tensor results in order.
        template: the result's structure: an index into ``results``, a list of templates, or a constant.
        kernel: worker kernel that replaces the operator, or ``None``.
        resize: (argument name, index of result) whose local shape replaces the argument.
        dynamic: results are known only after running; the client waits for their shapes.
        random: draws from a generator.
        fallback: no rule existed; inputs were gathered and the operator runs replicated.
        after: for a result, the steps from the placements in which it is made to those of its spec.
        rounds: the sends of a ring, see ``planner.context``.
        copies_view: the result should be a view but its base had to be moved: it is a copy the client must refresh.
    """

    call: Call
    mesh: MeshLayout
    wanted: tuple[TensorSpec, ...]
    moves: tuple[tuple[int, tuple[Step, ...]], ...]
    back: tuple[tuple[int, tuple[Step, ...]], ...]
    reduce: tuple[tuple[int, TensorSpec], ...]
    results: tuple[Result, ...]
    template: Any
    kernel: str | None = None
    resize: tuple[str, int] | None = None
    dynamic: bool = False
    random: bool = False
    fallback: bool = False
    copies_view: bool = False
    after: tuple[tuple[int, tuple[Step, ...]], ...] = ()
    rounds: tuple[tuple[tuple[int, Step], ...], ...] = ()

    @property
    def steps(self) -> list[Step]:
        """Every redistribution step of a run."""
        listed = [step for _, steps in (*self.moves, *self.back, *self.after) for step in steps]
        return listed + [step for row in self.rounds for _, step in row]


def make_plan(call: Call, mesh: MeshLayout) -> Plan:
    """Plan a call whose tensors all live on ``mesh``.

    Raises:
        Exception: what torch raises on the shapes and dtypes given.
    """
    value: Any = None
    metas: list[torch.Tensor] = []
    if call.func._schema.returns:
        try:
            value, metas = predict(call)
        except NoMeta:
            return _dynamic_plan(call, mesh)
    outs: list[torch.Tensor] = []
    template = _template(value, outs)
    if any(o.layout != torch.strided for o in outs):
        raise NotImplementedError(f"{call.func} gives a {outs[0].layout} tensor; distributed tensors are strided.")
    written = frozenset(call.written_slots())
    _refuse_overlap(call, written)
    fallback = False
    random = draws(call)
    whole = all(s.is_replicated for s in call.specs)
    rule = None if whole else _rule_of(call, outs)
    if rule is None:
        fallback = not whole
        rule = replicated(call, outs)
        if random:
            rule = Rule(rule.inputs, rule.outputs, kernel="random")
    if whole:
        everywhere = (REPLICATE,) * mesh.ndim
        choice = Choice((everywhere,) * len(call.specs), (everywhere,) * len(outs), frozenset())
    else:
        same = {i: slot for i, out in enumerate(outs) for slot, meta in enumerate(metas) if out is meta}
        choice = choose(rule, call.specs, mesh, _sizes(rule, call.specs, outs), written, same)
    return _assemble(call, mesh, rule, choice, outs, metas, template, written, random, fallback)


def _rule_of(call: Call, outs: list[torch.Tensor]) -> Rule | None:
    maker = find_rule(call) or default_rule(call, outs)
    try:
        return maker(call, outs) if maker else None
    except NoRule:
        return None


def legal_placements(call: Call, parts: int) -> list[tuple[list[Placement], list[Placement]]]:
    """Placements of inputs and results, on a mesh axis of ``parts`` devices, with which a call moves no data."""
    outs: list[torch.Tensor] = []
    try:
        _template(predict(call)[0], outs)
    except NoMeta:
        return [([REPLICATE] * len(call.specs), [REPLICATE])]
    rule = _rule_of(call, outs) or replicated(call, outs)
    return legal(rule, _sizes(rule, call.specs, outs), parts)


def _refuse_overlap(call: Call, written: frozenset[int]) -> None:
    """As torch does, refuse to write to a tensor several of whose elements are one (the result of ``expand``)."""
    for slot in written:
        spec = call.specs[slot]
        if any(n > 1 and step == 0 for n, step in zip(spec.shape, spec.stride, strict=True)):
            raise RuntimeError(
                f"{call.func}: unsupported operation: more than one element of the written-to tensor refers to a single "
                "memory location. Please clone() the tensor before performing the operation."
            )


def _sizes(rule: Rule, specs: Sequence[TensorSpec], outs: Sequence[torch.Tensor]) -> dict[Label, int]:
    sizes: dict[Label, int] = {}
    for labels, shape in (
        *zip(rule.inputs, (s.shape for s in specs), strict=True),
        *zip(rule.outputs, (tuple(o.shape) for o in outs), strict=True),
    ):
        assert len(labels) == len(shape), f"rule labels {labels} do not fit shape {shape}"
        for label, n in zip(labels, shape, strict=True):
            if label is None or label == rule.joined:
                continue
            if sizes.setdefault(label, n) != n and label not in rule.units:
                raise AssertionError(f"label {label} has sizes {sizes[label]} and {n}")
    return sizes


def _assemble(
    call: Call,
    mesh: MeshLayout,
    rule: Rule,
    choice: Choice,
    outs: list[torch.Tensor],
    metas: list[torch.Tensor],
    template: Any,
    written: frozenset[int],
    random: bool,
    fallback: bool,
) -> Plan:
    moves, back, reduce, wanted = [], [], [], []
    for slot, spec in enumerate(call.specs):
        goal = choice.inputs[slot]
        if goal == spec.placements:
            wanted.append(spec)
            continue
        reduced = _reduced(spec, goal, slot in written)
        if reduced is not None:
            reduce.append((slot, reduced))
        target = spec.replace(goal)
        wanted.append(target)
        moves.append((slot, plan_steps(spec, target)))
        if slot in written:
            back.append((slot, plan_steps(target, spec)))
    moved = {slot for slot, _ in moves}
    results: list[Result] = []
    copies = False
    for i, out in enumerate(outs):
        alias, same, offset = _alias(call, out, metas, written)
        if same and alias is not None and tuple(out.shape) == call.specs[alias].shape:
            spec = call.specs[alias]
        else:  # also where the operator resized its argument
            spec = TensorSpec(mesh, choice.outputs[i], tuple(out.shape), tuple(out.stride()), out.dtype)
        if alias is not None and not same and alias in moved:
            copies = True
        results.append(Result(spec, alias, offset, same))
    after = []
    for i, placements in enumerate(choice.made or ()):
        final = results[i].spec
        if final is not None and placements != final.placements:
            after.append((i, plan_steps(final.replace(placements), final)))
    ring: tuple[tuple[tuple[int, Step], ...], ...] = ()
    if choice.rings and rule.halo is not None:
        ring = halo_rounds(wanted[0], rule.halo, choice.rings[0])
    elif choice.rings:
        slots = [call.slots[name] for name in ("key", "value")]
        ring = rounds(wanted, slots, choice.rings)
        if "backward" not in call.name:
            ring = ring[:-1]  # the last round brings blocks home, which only their gradients need
    kernel = next((rule.kernels[c] for c in choice.cut if c in rule.kernels), None)
    if kernel is None and (choice.cut or random):
        kernel = rule.ring if choice.rings else rule.kernel
    return Plan(
        call, mesh, tuple(wanted), tuple(moves), tuple(back), tuple(reduce), tuple(results), template, kernel,
        rule.resize if choice.cut else None, False, random, fallback, copies, tuple(after), ring,
    )  # fmt: skip


def _reduced(spec: TensorSpec, goal: tuple[Placement, ...], is_written: bool) -> TensorSpec | None:
    """The spec after reducing the axes on which a Partial becomes whole, or cut and is not written; if there are any."""
    placements = tuple(
        g if p.is_partial() and (g.is_replicate() or (isinstance(g, Shard) and not is_written)) else p
        for p, g in zip(spec.placements, goal, strict=True)
    )
    return None if placements == spec.placements else spec.replace(placements)


def _alias(
    call: Call, out: torch.Tensor, metas: list[torch.Tensor], written: frozenset[int]
) -> tuple[int | None, bool, int]:
    """Slot that a result is or views, whether it is that argument itself, and the offset of a view."""
    for slot, meta in enumerate(metas):
        if out is meta:
            return slot, True, 0
    if is_view(call.func) or written:
        storage = out.untyped_storage()._cdata
        for slot, meta in enumerate(metas):
            if meta.untyped_storage()._cdata == storage:
                return slot, False, int(out.storage_offset())
    return None, False, 0


def _template(value: Any, outs: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        outs.append(value)
        return len(outs) - 1
    if isinstance(value, (list, tuple)):
        return [_template(v, outs) for v in value]
    if value is None:
        return None
    raise NotImplementedError(f"a result of type {type(value).__name__}")


def _dynamic_plan(call: Call, mesh: MeshLayout) -> Plan:
    """Gather everything, run replicated, let the workers say what came out."""
    moves, reduce, wanted, back = [], [], [], []
    for slot, spec in enumerate(call.specs):
        target = spec.replace((REPLICATE,) * mesh.ndim)
        wanted.append(target)
        if target.placements != spec.placements:
            reduced = _reduced(spec, target.placements, is_written=True)
            if reduced is not None:
                reduce.append((slot, reduced))
            moves.append((slot, plan_steps(spec, target)))
            if slot in set(call.written_slots()):
                back.append((slot, plan_steps(target, spec)))
    returns = call.func._schema.returns
    names = [str(r.type) for r in returns]
    results = tuple(Result(None) for n in names if n == "Tensor")
    if len(results) != len(names):
        raise OnClient(f"{call.func} returns {names}", find_rule(call) is not None)
    template: Any = 0 if len(results) == 1 else list(range(len(results)))
    random = draws(call)
    sharded = bool(moves)
    return Plan(
        call, mesh, tuple(wanted), tuple(moves), tuple(back), tuple(reduce), results, template,
        "random" if random else None, None, True, random, sharded and find_rule(call) is None,
    )  # fmt: skip
