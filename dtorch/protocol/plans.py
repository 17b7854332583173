"""Plans on the wire."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from typing import Any

from dtorch.core.errors import ProtocolError
from dtorch.core.spec import TensorSpec
from dtorch.core.steps import Step

# The namespaces whose operators a client may run on workers.
NAMESPACES = frozenset({"aten", "prims", "torchvision", "quantized", "torchao", "torch_nn", "dtorch"})


@dataclass(frozen=True)
class WireResult:
    """One tensor result: predicted spec (``None``: dynamic) and the slot of the argument it is, or ``None``."""

    spec: TensorSpec | None
    same: int | None
    alias: bool


@dataclass(frozen=True)
class WirePlan:
    """What a worker needs of a plan. ``args``/``kwargs`` hold Slot, Number, ... marks in place of changing values.

    Attributes:
        op: ``namespace::name.overload``; empty for a plan that only redistributes its single input.
        mesh: id of the mesh on which the operator runs.
        slots: spec of each tensor slot as it arrives.
        numbers: how many changing scalars follow the input ids.
        moves, back: (slot, steps) before and after the call.
        after: (result, steps) on results; rounds: (slot, step) of a ring's sends.
        results: tensor results in order; those with ``same`` take no new id.
        kernel: name of the worker kernel that replaces the operator.
        resize: (argument name, index of result) or ``None``.
        dynamic, random: see ``planner.plan.Plan``; flags 1 and 2 on the wire. Flag 4, for the controller's log: an
            argument is written that is none of the results.
    """

    op: str
    mesh: int
    slots: tuple[TensorSpec, ...]
    numbers: int
    args: list[Any]
    kwargs: dict[str, Any]
    moves: tuple[tuple[int, tuple[Step, ...]], ...]
    back: tuple[tuple[int, tuple[Step, ...]], ...]
    results: tuple[WireResult, ...]
    kernel: str | None
    resize: tuple[str, int] | None
    dynamic: bool
    random: bool
    after: tuple[tuple[int, tuple[Step, ...]], ...] = ()
    rounds: tuple[tuple[tuple[int, Step], ...], ...] = ()


def _keyword(name: Any) -> str:
    """The name of an argument. Workers write it into the code that they compile, so it may be nothing else."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r:.80} is no name of an argument")
    return name


def decode_plan(data: Any, specs: dict[int, TensorSpec], decode_value: Any) -> WirePlan:
    """A plan from its msgpack form, see ``client.lower.encode_plan``.

    Raises:
        ProtocolError: malformed data.
    """

    def step(row: Any) -> Step:
        kind, axis, src, dst = row
        return Step(kind, axis, specs[src], specs[dst])

    def steps(rows: Any) -> tuple[tuple[int, tuple[Step, ...]], ...]:
        return tuple((slot, tuple(map(step, row))) for slot, row in rows)

    try:
        op, mesh, slots, numbers, args, kwargs, moves, back, results, kernel, resize, flags, after, rounds = data
        return WirePlan(
            str(op),
            int(mesh),
            tuple(specs[s] for s in slots),
            int(numbers),
            [decode_value(a) for a in args],
            {_keyword(k): decode_value(v) for k, v in kwargs.items()},
            steps(moves),
            steps(back),
            tuple(WireResult(None if s is None else specs[s], same, bool(alias)) for s, same, alias in results),
            kernel,
            None if resize is None else (str(resize[0]), int(resize[1])),
            bool(flags & 1),
            bool(flags & 2),
            steps(after),
            tuple(tuple((slot, step(row)) for slot, row in group) for group in rounds),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ProtocolError(f"malformed plan: {e}") from e
