"""Calls that differ in sizes only: planned a few times, afterwards told by arithmetic.

The sizes, strides and whole-number arguments of a call form a vector. While a sequence grows, the vectors of a call lie
on a line, ``base + t * steps``, and so do the numbers of its results (sizes, strides, offsets). A ``Line`` is the plan of
all calls on such a line. It is kept only where every plan on it is known to be of one structure:

* The operator is one of those below, whose results' numbers are polynomials of those of the call while the comparisons
  it makes come out the same: sizes with 1, strides of a tensor with each other and with the extents of its dimensions
  (that is its memory order, and whether it has gaps), positions with sizes. ``_domain`` is the part of the line on which
  they all come out as in the calls that were planned.
* Plans of more calls on the line than such a polynomial has degrees agree with one affine function. So it is that.
* Nothing is moved, and what is cut has one size along the line. Then the placements that the call has cost nothing at
  any size, and the first choice that costs nothing is always taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, permutations, product
from typing import Any

import torch

from dtorch.core.placements import Shard
from dtorch.core.spec import TensorSpec
from dtorch.planner.call import Call
from dtorch.planner.plan import Plan, Result, make_plan
from dtorch.planner.rule import find_rule
from dtorch.planner.rules.pointwise import default_rule, pointwise

# Besides all that work element by element. Whole numbers of the first are sizes; those of the others are dimensions or
# positions. What rounds a quotient down (split, unfold, pooling) or takes the smaller of two sizes (diagonal) is not here.
_SIZED = frozenset({"aten.view", "aten._unsafe_view", "aten.expand", "aten.repeat"})
_OTHERS = frozenset(
    f"aten.{n}"
    for n in (
        "permute", "t", "transpose", "unsqueeze", "squeeze", "select", "slice", "split_with_sizes", "unbind", "cat", "stack",
        "mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm",
        "layer_norm", "_fused_rms_norm", "rms_norm", "sum", "mean", "amax", "amin", "all", "any", "max", "min", "argmax",
        "argmin", "cumsum", "prod", "logsumexp", "sort", "topk", "flip", "tril", "triu", "isin", "embedding", "index",
        "index_select", "gather", "scatter", "index_put", "index_copy",
    )
)  # fmt: skip

_FURTHER = (1, 2, 5, 64)
"""So far beyond the calls that were seen, in steps, lie those that are planned to be sure."""
_LEAST_POINTS = 6
"""Different calls that must agree: one more than the degree of any polynomial of sizes that these operators have, and
one to spare. A stride is a product of at most four sizes that vary."""
_FAR = 1 << 40
_SAMPLES, _MOST_LINES, _MOST_FAILURES = 8, 32, 8


@dataclass(frozen=True, slots=True)
class Free:
    """Arguments, by position and by name, whose numbers are no part of a plan but go with each command."""

    positions: frozenset[int]
    names: frozenset[str]


def outline(call: Call, free: Free) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """A call without its numbers, hashable; and the numbers: shape and strides of every tensor, whole-number arguments."""
    form: list[Any] = []
    numbers: list[int] = []

    def walk(value: Any, is_free: bool) -> None:
        kind = type(value)
        form.append(kind)
        if kind is TensorSpec:
            form.extend((value.mesh, value.placements, value.dtype, len(value.shape)))
            numbers.extend(value.shape)
            numbers.extend(value.stride)
        elif kind is int:
            if not is_free:
                numbers.append(value)
        elif kind is list or kind is tuple:
            form.append(len(value))
            for v in value:
                walk(v, is_free and type(v) is float)
        elif not (kind is float and is_free) and kind is not torch.Generator and kind is not torch.device:
            form.append(value)

    for i, a in enumerate(call.args):
        walk(a, i in free.positions)
    for name, a in call.kwargs.items():
        form.append(name)
        walk(a, name in free.names)
    return tuple(form), tuple(numbers)


def _rebuilt(call: Call, free: Free, tensor: Callable[[TensorSpec], Any], number: Callable[[], Any]) -> Call:
    """The call with something else for its tensors and numbers, asked for in the order of ``outline``."""

    def walk(value: Any, is_free: bool) -> Any:
        if isinstance(value, TensorSpec):
            return tensor(value)
        if isinstance(value, (list, tuple)):
            return [walk(v, is_free and type(v) is float) for v in value]
        return number() if type(value) is int and not is_free else value

    args = tuple(walk(a, i in free.positions) for i, a in enumerate(call.args))
    return Call(call.func, args, {k: walk(v, k in free.names) for k, v in call.kwargs.items()})


def _with_numbers(call: Call, free: Free, numbers: Iterable[int]) -> Call:
    """The same call with other numbers."""
    rest = iter(numbers)

    def tensor(spec: TensorSpec) -> TensorSpec:
        shape, stride = (tuple(islice(rest, spec.ndim)) for _ in range(2))
        return TensorSpec(spec.mesh, spec.placements, shape, stride, spec.dtype)

    return _rebuilt(call, free, tensor, lambda: next(rest))


_Affine = tuple[int, int]
"""A number along a line: that at ``t = 0``, and what each step adds."""
_Row = tuple[_Affine, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """Where a result's numbers are on the line."""

    shape: _Row
    stride: _Row
    offset: _Affine


@dataclass(frozen=True, slots=True)
class Line:
    """The plan of all calls whose numbers are ``base + t * steps`` for a whole ``t`` from ``low`` to ``high``.

    Attributes:
        pivot: a place at which the numbers differ.
        holes: other values of ``t`` that do not belong to it.
        plan: that at ``t = 0``.
        forms: of each result; ``None`` for one that is an argument.
        told: whether whole-number arguments differ along the line.
        kept: what the caller keeps with ``plan``.
    """

    base: tuple[int, ...]
    steps: tuple[int, ...]
    pivot: int
    low: int
    high: int
    holes: frozenset[int]
    plan: Plan
    forms: tuple[_Form | None, ...]
    told: bool
    kept: Any

    def place(self, numbers: Sequence[int]) -> int | None:
        """The ``t`` of a call, or ``None`` where it is not on the line."""
        p = self.pivot
        t, rest = divmod(numbers[p] - self.base[p], self.steps[p])
        if rest or not self.low <= t <= self.high or t in self.holes:
            return None
        for n, a, step in zip(numbers, self.base, self.steps, strict=True):
            if n != a + step * t:
                return None
        return t

    def plan_of(self, call: Call, t: int) -> Plan:
        """The plan of a call on the line."""
        results = []
        for r, form in zip(self.plan.results, self.forms, strict=True):
            if form is None:
                assert r.alias is not None
                results.append(Result(call.specs[r.alias], r.alias, 0, True))
                continue
            assert r.spec is not None
            shape, stride = (tuple(a + step * t for a, step in row) for row in (form.shape, form.stride))
            spec = TensorSpec(r.spec.mesh, r.spec.placements, shape, stride, r.spec.dtype)
            results.append(Result(spec, r.alias, form.offset[0] + form.offset[1] * t))
        return replace(self.plan, call=call, wanted=tuple(call.specs), results=tuple(results))


class Family:
    """All calls of one outline: the lines found among them, and those planned last."""

    def __init__(self, free: Free) -> None:
        self._free = free
        self.lines: deque[Line] = deque(maxlen=_MOST_LINES)
        self._samples: deque[tuple[tuple[int, ...], Plan]] = deque(maxlen=_SAMPLES)
        self._failures = 0

    def find(self, numbers: Sequence[int]) -> tuple[Line, int] | None:
        """The line that a call is on, and where."""
        for line in tuple(self.lines):  # another thread may be adding one
            t = line.place(numbers)
            if t is not None:
                return line, t
        return None

    def learn(self, numbers: tuple[int, ...], plan: Plan, kept: Any) -> None:
        """Look at a call that was planned: the third of some that are on a line may make it known.

        Args:
            numbers: of its outline.
            plan: as the planner made it.
            kept: what a line that goes by this plan shall keep.
        """
        if not _follows(plan) or self._failures >= _MOST_FAILURES:
            return
        seen: dict[tuple[int, ...], tuple[tuple[int, ...], Plan]] = {}
        for sample in tuple(self._samples):
            steps = _direction(numbers, sample[0])
            if steps is None:
                return  # the very same: its plan was made twice, by two threads
            if steps in seen:
                line = self._line(numbers, steps, plan, [seen[steps], sample], kept)
                if line is not None:
                    self.lines.append(line)
                    self._failures = 0
                    return
                self._failures += 1
            seen[steps] = sample
        self._samples.append((numbers, plan))

    def _line(
        self, base: tuple[int, ...], steps: tuple[int, ...], plan: Plan,
        others: Sequence[tuple[tuple[int, ...], Plan]], kept: Any,
    ) -> Line | None:  # fmt: skip
        """The line through these calls, where it is one of one structure."""
        pivot = next(i for i, s in enumerate(steps) if s)
        numbers = tuple(zip(base, steps, strict=True))
        tensors, whole = _parts(plan.call, self._free, numbers)
        plans = {0: plan, **{(n[pivot] - base[pivot]) // steps[pivot]: p for n, p in others}}
        domain = _domain(plan.call.name, tensors, whole, list(plans))
        if domain is None:
            return None
        low, high, holes = domain
        for t in (low, *(max(plans) + k for k in _FURTHER)):
            if t in plans or t in holes or t > high:
                continue
            try:
                plans[t] = make_plan(_with_numbers(plan.call, self._free, (a + s * t for a, s in numbers)), plan.mesh)
            except Exception:  # torch refuses such a call
                return None
        if len(plans) < _LEAST_POINTS or not all(_alike(plan, p) for p in plans.values()):
            return None
        forms = [None if r.same else _form(plans, i) for i, r in enumerate(plan.results)]
        if any(f is None and not r.same for f, r in zip(forms, plan.results, strict=True)):
            return None
        if not _cut_alike(plan, [shape for shape, _ in tensors], forms):
            return None
        told = any(step for _, step in whole)
        return Line(base, steps, pivot, low, high, holes, plan, tuple(forms), told, kept)


def _follows(plan: Plan) -> bool:
    """Whether a plan is of a kind whose structure does not depend on sizes but as ``_domain`` says."""
    call = plan.call
    by_element = find_rule(call) is None and default_rule(call, [None]) is pointwise
    if not (by_element or call.name in _SIZED or call.name in _OTHERS):
        return False
    if plan.moves or plan.back or plan.reduce or plan.after or plan.rounds:
        return False
    return not (plan.dynamic or plan.random or plan.fallback or plan.copies_view or not plan.results)


def _direction(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """From one call to another in smallest steps, either way; ``None`` where they are the same."""
    steps = [y - x for x, y in zip(a, b, strict=True)]
    unit = math.gcd(*steps)
    if not unit:
        return None
    if next(filter(None, steps)) < 0:
        unit = -unit
    return tuple(s // unit for s in steps)


def _alike(a: Plan, b: Plan) -> bool:
    """Whether two plans are the same but for sizes, strides and offsets."""
    if not _follows(b) or (a.template, a.kernel, a.resize, len(a.results)) != (b.template, b.kernel, b.resize, len(b.results)):
        return False
    for r, q in zip(a.results, b.results, strict=True):
        if r.spec is None or q.spec is None or (r.alias, r.same) != (q.alias, q.same):
            return False
        if (r.spec.placements, r.spec.dtype, r.spec.ndim) != (q.spec.placements, q.spec.dtype, q.spec.ndim):
            return False
        if r.same and any(x.spec is not p.call.specs[x.alias] for x, p in ((r, a), (q, b)) if x.alias is not None):
            return False  # an argument that was resized
    return True


def _form(plans: dict[int, Plan], index: int) -> _Form | None:
    """Where a result's numbers are on the line, if they are on one."""
    rows: dict[int, tuple[int, ...]] = {}
    for t, plan in plans.items():
        r = plan.results[index]
        assert r.spec is not None
        rows[t] = (*r.spec.shape, *r.spec.stride, r.offset)
    at = next(t for t in rows if t)
    found: list[_Affine] = []
    for a, b in zip(rows[0], rows[at], strict=True):
        step, rest = divmod(b - a, at)
        if rest:
            return None
        found.append((a, step))
    if any(row != tuple(a + step * t for a, step in found) for t, row in rows.items()):
        return None
    n = len(found) // 2
    return _Form(tuple(found[:n]), tuple(found[n : 2 * n]), found[-1])


def _parts(call: Call, free: Free, numbers: Iterable[_Affine]) -> tuple[list[tuple[_Row, _Row]], list[_Affine]]:
    """(sizes, strides) of each tensor of a call, and its whole-number arguments."""
    rest = iter(numbers)
    tensors: list[tuple[_Row, _Row]] = []
    whole: list[_Affine] = []

    def tensor(spec: TensorSpec) -> None:
        tensors.append((tuple(islice(rest, spec.ndim)), tuple(islice(rest, spec.ndim))))

    _rebuilt(call, free, tensor, lambda: whole.append(next(rest)))
    return tensors, whole


def _cut_alike(plan: Plan, shapes: Sequence[_Row], forms: Sequence[_Form | None]) -> bool:
    """Whether whatever is cut has one size along the line, and is not cut in segments."""
    made = [(r.spec, f.shape) for r, f in zip(plan.results, forms, strict=True) if r.spec is not None and f is not None]
    for spec, shape in (*zip(plan.call.specs, shapes, strict=True), *made):
        if any(isinstance(p, Shard) and (p.segments or shape[p.dim][1]) for p in spec.placements):
            return False
    return True


def _domain(
    name: str, tensors: Sequence[tuple[_Row, _Row]], whole: Sequence[_Affine], points: Sequence[int]
) -> tuple[int, int, frozenset[int]] | None:
    """The part of a line on which all comparisons come out as at these points of it.

    Args:
        name: of the operator.
        tensors, whole: the numbers along the line.
        points: values of ``t``.

    Returns:
        Lowest and highest ``t`` and the values between them that are no part of it; or ``None`` where the points differ.
    """
    holes: set[int] = set()
    signs: list[_Affine] = []  # differences whose sign decides something
    sizes = [n for shape, _ in tensors for n in shape]
    if (0, 0) in sizes:
        return None
    for shape, stride in tensors:
        signs += [(a - 1, step) for a, step in (*shape, *stride)]
        for i, j in combinations(range(len(shape)), 2):
            x, y = (shape[i], shape[j]) if stride[i] == stride[j] else (stride[i], stride[j])
            signs.append((x[0] - y[0], x[1] - y[1]))
        for i, j in permutations(range(len(shape)), 2):
            holes |= _roots(stride[i], stride[j], shape[j])
    if name in _SIZED:
        signs += [(a - 1, step) for a, step in whole]
    else:  # a position may count from either end, and lie before or behind another one
        for (a, p), (b, q) in product(whole, sizes):
            signs += [(a - b, p - q), (a + b, p + q)]
            signs += [(a + b - c, p + q - r) for c, r in whole]
        signs += [(a - b, p - q) for (a, p), (b, q) in combinations(whole, 2)]
    low, high = -_FAR, _FAR
    for a, step in signs:
        if not step:
            continue
        at = [a + step * t for t in points]
        if min(at) <= 0 <= max(at):
            return None
        sign = 1 if at[0] > 0 else -1  # sign * (a + step * t) stays at least 1
        if sign * step > 0:
            low = max(low, -((sign * a - 1) // (sign * step)))
        else:
            high = min(high, (sign * a - 1) // -(sign * step))
    return None if holes.intersection(points) else (low, high, frozenset(holes))


def _roots(stride: _Affine, inner: _Affine, size: _Affine) -> set[int]:
    """Where a stride is by chance just what another dimension extends over; none where it is so everywhere."""
    (p, q), (r, s), (u, v) = stride, inner, size
    a, b, c = -s * v, q - r * v - s * u, p - r * u
    if not a:
        return {-c // b} if b and c % b == 0 else set()
    root = math.isqrt(max(b * b - 4 * a * c, 0))
    if root * root != b * b - 4 * a * c:
        return set()
    return {n // (2 * a) for n in (-b - root, -b + root) if n % (2 * a) == 0}
