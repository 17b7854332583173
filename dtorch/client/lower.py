"""A plan made ready: sent to the workers once, and kept in the form that the dispatcher runs fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dtorch.client.session import Session
from dtorch.core.spec import TensorSpec
from dtorch.core.steps import Step
from dtorch.core.torch_private import make_wrapper_subclass
from dtorch.planner.call import Call, draws
from dtorch.planner.plan import Plan, Result
from dtorch.protocol.values import DeviceSlot, GeneratorSlot, Number, Slot, encode


class Ready:
    """A plan in the session's terms.

    Attributes:
        code: command code that runs it.
        plain: one new result (perhaps a view of slot ``view_slot``), and emitting the command is all there is to do.
        shape, stride, dtype, device, spec: of the first result.
        offset: storage offset of a view relative to its base, in elements.
        moves: some input is redistributed.
        makers: for each result, constructor of its wrapper, or ``None`` when it is an argument.
    """

    __slots__ = (
        "code", "device", "dtype", "make", "makers", "moves", "offset", "plain", "plan", "shape", "spec", "stride",
        "view_slot",
    )  # fmt: skip

    def __init__(self, session: Session, plan: Plan, code: int, cls: type, alias_slot: int | None) -> None:
        self.plan, self.code = plan, code
        self.make = make_wrapper_subclass
        self.makers: list[Callable[..., torch.Tensor] | None] = []
        self.device = torch.device("dtorch", plan.mesh.id)
        for r in plan.results:
            self.makers.append(None if r.spec is None or r.same else wrapper_maker(cls, r.spec, self.device))
        single = len(plan.results) == 1 and self.makers[0] is not None and plan.template == 0
        self.moves = bool(plan.moves or plan.back)
        special = plan.dynamic or plan.random or plan.after or plan.reduce or plan.back or plan.copies_view or plan.fallback
        written = any(True for _ in plan.call.written_slots())
        # What reads a Partial tensor takes the lock: another thread may be reducing the tensor in place.
        reads_partial = any(s.has_partial for s in plan.call.specs)
        self.view_slot = alias_slot
        # The first tensor argument stands at its slot's place in the arguments when it is slot 0.
        self.plain = bool(single and not (special or written or reads_partial) and alias_slot in (None, 0))
        self.spec: Any = plan.results[0].spec if plan.results else None
        self.offset = plan.results[0].offset if plan.results else 0
        if self.spec is not None:
            self.shape, self.stride, self.dtype = torch.Size(self.spec.shape), self.spec.stride, self.spec.dtype


def wrapper_maker(cls: type, spec: TensorSpec, device: torch.device) -> Callable[..., torch.Tensor]:
    """Constructor of wrappers with this spec; takes ``storage_offset=``."""
    return partial(
        make_wrapper_subclass, cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=device,
        layout=torch.strided,
    )  # fmt: skip


def encode_plan(session: Session, plan: Plan, args: Sequence[Any], kwargs: dict[str, Any], numbers: int) -> list[Any]:
    """The msgpack form of a plan, see ``protocol.plans``; ``args``/``kwargs`` already hold marks for changing values."""

    def steps(rows: Sequence[tuple[int, tuple[Step, ...]]]) -> list[Any]:
        return [
            [slot, [[s.kind, s.axis, session.spec_id(s.src), session.spec_id(s.dst)] for s in row]]
            for slot, row in rows
        ]

    func = plan.call.func
    return [
        f"{func._schema.name}.{func._overloadname}",
        plan.mesh.id,
        [session.spec_id(s) for s in plan.call.specs],
        numbers,
        [encode(a) for a in args],
        {k: encode(v) for k, v in kwargs.items()},
        steps(plan.moves),
        steps(plan.back),
        [_encode_result(session, r) for r in plan.results],
        plan.kernel,
        list(plan.resize) if plan.resize else None,
        plan.dynamic | plan.random << 1 | _writes_unseen(plan) << 2,
        steps(plan.after),
        [[[slot, steps([(slot, (step,))])[0][1][0]] for slot, step in row] for row in plan.rounds],
    ]


def _encode_result(session: Session, r: Result) -> list[Any]:
    return [None if r.spec is None else session.spec_id(r.spec), r.alias if r.same else None, r.alias is not None]


def encode_like(session: Session, plan: Plan, data: list[Any]) -> list[Any]:
    """The form of a plan that moves nothing and differs in the specs only from one whose form is ``data``."""
    slots = [session.spec_id(s) for s in plan.call.specs]
    return [*data[:2], slots, *data[3:8], [_encode_result(session, r) for r in plan.results], *data[9:]]


def _writes_unseen(plan: Plan) -> bool:
    """Whether an argument is written that is none of the results."""
    return not {r.alias for r in plan.results if r.same}.issuperset(plan.call.written_slots())


def encode_move(session: Session, steps: Sequence[Step], src: TensorSpec, dst: TensorSpec) -> list[Any]:
    """A plan that only redistributes one tensor."""
    rows = [[s.kind, s.axis, session.spec_id(s.src), session.spec_id(s.dst)] for s in steps]
    return [
        "",
        dst.mesh.id,
        [session.spec_id(src)],
        0,
        [{"t": 0}],
        {},
        [[0, rows]],
        [],
        [[session.spec_id(dst), None, False]],
        None, None, 0, [], []]


def mark(
    call: Call, number_names: frozenset[str], numbers_positional: frozenset[int]
) -> tuple[list[Any], dict[str, Any], int]:
    """Arguments with marks for tensors, changing scalars, devices and generators; and the count of scalars."""
    slots = iter(range(len(call.specs)))
    count = 0
    random = draws(call)

    def convert(value: Any, number: bool) -> Any:
        nonlocal count
        if isinstance(value, TensorSpec):
            return Slot(next(slots))
        if isinstance(value, (list, tuple)):
            return [convert(v, number and type(v) is float) for v in value]
        if isinstance(value, torch.device):
            return DeviceSlot()
        if isinstance(value, torch.Generator):
            return GeneratorSlot() if random else None
        if number and type(value) in (int, float):
            count += 1
            return Number(count - 1)
        return value

    args = [convert(a, i in numbers_positional) for i, a in enumerate(call.args)]
    kwargs = {k: convert(v, k in number_names) for k, v in call.kwargs.items()}
    if random and any(a.name == "generator" for a in call.func._schema.arguments):
        kwargs["generator"] = GeneratorSlot()
    return args, kwargs, count
