"""Placement rules as factors.

A rule names every dimension of every tensor of a call with a label. Dimensions with one label are cut together: a
mesh axis may shard a label wherever it stands. A label that no result has is a contraction: sharding it leaves the
results ``Partial`` with the reduction given in ``reduce``. ``None`` marks a dimension that every device must hold
whole. From this alone the chooser derives all legal placements on every mesh, so a rule is a few lines whatever the
number of axes. (The idea of one factor list an operator is that of Shardy's operator sharding rules.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtorch.core.errors import DtorchError
from dtorch.core.spec import Span
from dtorch.planner.call import Call

Label = Any  # any hashable; None: whole
Labels = tuple[Label, ...]


@dataclass(frozen=True)
class Fold:
    """A dimension inside of those that a reshape folds into one, or gets by unfolding one.

    Attributes:
        inner: the dimension among those that are, or come, apart.
        outer: the dimension that holds them all.
        count: product of the sizes before it.
        size: its own.
        row: product of the sizes after it.
        unfolds: whether ``inner`` is a dimension of the result.
    """

    inner: int
    outer: int
    count: int
    size: int
    row: int
    unfolds: bool


@dataclass(frozen=True)
class Rule:
    """Labels and exceptions of one call.

    Attributes:
        inputs: labels of each tensor slot.
        outputs: labels of each tensor result, in order.
        reduce: for a label that a result lacks, the reduction that completes it ("sum", "max", ...).
        linear: sets of slots; when just these are Partial of the given reductions, all results are Partial likewise.
        units: for a label, the number of indivisible units in it: it is only cut evenly between units.
        even: labels that are only cut when every device gets the same size.
        kernels: for a label, the worker kernel that replaces the operator on devices where the label is cut.
        kernel: the worker kernel that replaces the operator whenever some tensor is not replicated.
        sequence, heads, ring: attention under context parallelism, see ``planner.context``: labels of the sequence
            dimensions (rows and columns), the label of the heads, and the kernel that passes blocks round.
        halo: (dimension, width): where the first slot is cut along it, the operator needs so many neighbours on both
            sides of each piece, which its ring kernel fetches; the first result is cut likewise.
        resize: (argument name, index of result): the argument is replaced by that result's local shape.
        entries: for an operator on lists, the slots and results of each entry: no entry minds where others are.
        folds: dimensions that a reshape folds into one, or unfolds, see ``planner.segments``.
        scales: for a label of a reshape, its size in the input and in the result, where they differ.
        in_order: labels that are never cut in segments: kernels ask for the one stretch of them that a device has.
        joined: a label whose dimensions are stretches of one line: what stands end to end after ``cat`` and is told
            apart again by ``split``. ``stretches`` has, for each slot and each result that has the label, from
            where to where on the line it goes. It is cut in segments, see ``planner.segments``.
        unused: slots whose values the operator does not read (``zeros_like``): they stay where they are.
        whole: results (by index) that every device computes alike, so that they stay whole although inputs are cut.
    """

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    reduce: Mapping[Label, str] = field(default_factory=dict)
    linear: Sequence[frozenset[int]] = ()
    linear_ops: tuple[str, ...] = ("sum", "avg")
    units: Mapping[Label, int] = field(default_factory=dict)
    even: frozenset[Label] = frozenset()
    kernels: Mapping[Label, str] = field(default_factory=dict)
    kernel: str | None = None
    resize: tuple[str, int] | None = None
    sequence: Sequence[Label] = ()
    heads: Label = None
    ring: str | None = None
    halo: tuple[int, int] | None = None
    entries: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    folds: Sequence[Fold] = ()
    scales: Mapping[Label, tuple[int, int]] = field(default_factory=dict)
    in_order: frozenset[Label] = frozenset()
    joined: Label = None
    stretches: tuple[Mapping[int, Span], Mapping[int, Span]] = ({}, {})
    unused: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()

    @property
    def labels(self) -> list[Label]:
        """Every label in order of appearance."""
        seen: dict[Label, None] = {}
        for labels in (*self.inputs, *self.outputs):
            for label in labels:
                if label is not None:
                    seen.setdefault(label)
        return list(seen)


class NoRule(DtorchError):
    """The operator has no rule for this call: gather, run replicated."""


RuleFunction = Callable[[Call, Sequence[Any]], Rule]
_RULES: dict[str, RuleFunction] = {}


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for operators, by ``aten.name`` or ``aten.name.overload``; in-place forms are included.

    The function gets the call and the predicted results (objects with ``shape``, ``stride()`` and ``dtype``) and
    returns the ``Rule`` or raises ``NoRule``.
    """

    def register(f: RuleFunction) -> RuleFunction:
        for name in names:
            if name in _RULES:
                raise ValueError(f"two rules for {name}")
            _RULES[name] = f
        return f

    return register


def find_rule(call: Call) -> RuleFunction | None:
    """The rule of the overload, else of the operator, or ``None``."""
    return _RULES.get(f"{call.name}.{call.func._overloadname}") or _RULES.get(call.name)


def registered() -> frozenset[str]:
    """Names of all operators with a rule."""
    return frozenset(_RULES)


def replicated(call: Call, outs: Sequence[Any]) -> Rule:
    """The rule of an operator whose every dimension must be whole."""
    return Rule([(None,) * s.ndim for s in call.specs], [(None,) * len(o.shape) for o in outs])
