"""``dtorch.explain``: what each operator of a call did with placements, and what it communicated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtorch.client import graph
from dtorch.client.sites import caller, describe
from dtorch.core.spec import TensorSpec
from dtorch.core.steps import Step
from dtorch.planner.plan import Plan
from dtorch.planner.redistribute import step_bytes


@dataclass(frozen=True)
class Communication:
    """One redistribution step: what for, which collective, bytes that crossed between devices (all together)."""

    kind: str
    axis: int
    bytes: int
    src: str
    dst: str

    def __str__(self) -> str:
        axis = "" if self.axis < 0 else f" on axis {self.axis}"
        return f"{self.kind}{axis}: {self.src} -> {self.dst}, {self.bytes:,} bytes"


@dataclass(frozen=True)
class Line:
    """One operator: name, placements of its tensors and results, communication, user line."""

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    moves: tuple[Communication, ...]
    fallback: bool
    site: str


@dataclass
class Explanation:
    """The report: ``lines`` in order, and the result of the explained call."""

    lines: list[Line] = field(default_factory=list)
    result: Any = None

    @property
    def bytes(self) -> int:
        """Bytes that crossed between devices, all together."""
        return sum(m.bytes for line in self.lines for m in line.moves)

    @property
    def collectives(self) -> dict[str, int]:
        """Number of steps that communicated, by kind."""
        found: dict[str, int] = {}
        for line in self.lines:
            for m in line.moves:
                if m.bytes:
                    found[m.kind] = found.get(m.kind, 0) + 1
        return found

    def __str__(self) -> str:
        out = []
        for line in self.lines:
            mark = "  (no rule: gathered, replicated)" if line.fallback else ""
            out.append(
                f"{line.op}: {'; '.join(line.inputs) or '-'} -> {'; '.join(line.outputs) or '-'}{mark}   {line.site}"
            )
            out.extend(f"    {m}" for m in line.moves)
        totals = ", ".join(f"{n} {kind}" for kind, n in self.collectives.items()) or "no communication"
        out.append(f"{len(self.lines)} operators; {totals}; {self.bytes:,} bytes")
        return "\n".join(out)


class Observer:
    """Collects lines while it is a session's ``observer``."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def ran(self, plan: Plan, frame: Any) -> None:
        """An operator was issued."""
        self.lines.append(
            Line(
                str(plan.call.func),
                tuple(_place(s) for s in plan.call.specs),
                tuple(_place(r.spec) for r in plan.results if r.spec is not None),
                _communication(plan.steps),
                plan.fallback,
                describe(caller(frame)),
            )
        )

    def moved(self, src: TensorSpec, dst: TensorSpec, steps: tuple[Step, ...], frame: Any) -> None:
        """A tensor was redistributed by itself."""
        self.lines.append(
            Line("redistribute", (_place(src),), (_place(dst),), _communication(steps), False, describe(caller(frame)))
        )


def _place(spec: TensorSpec) -> str:
    return f"{tuple(spec.shape)} [{', '.join(map(str, spec.placements))}]"


def _communication(steps: Any) -> tuple[Communication, ...]:
    return tuple(
        Communication(s.kind, s.axis, step_bytes(s), str(list(s.src.placements)), str(list(s.dst.placements)))
        for s in steps
    )


def plan_stats() -> dict[str, int]:
    """How the calls of the current session came to their plans so far.

    Returns:
        ``"planned"``: calls that the planner had to look at, redistributions and factories among them; ``"derived"``:
        calls that differ from those in sizes only, whose plans were told by arithmetic. All others found a plan.
    """
    plans = graph.current_session().plans
    return {"planned": plans.planned, "derived": plans.derived}


def explain(fn: Callable[..., Any], *args: Any, quiet: bool = False, **kwargs: Any) -> Explanation:
    """Run ``fn(*args, **kwargs)`` and report each operator's placements and communication.

    Args:
        fn: any function of distributed tensors, a module for instance.
        quiet: do not print the report.

    Returns:
        The report; its ``result`` is what ``fn`` returned.
    """
    observer, sessions = Observer(), graph.sessions() or [graph.current_session()]
    for session in sessions:
        session.observer = observer
    try:
        result = fn(*args, **kwargs)
    finally:
        for session in sessions:
            session.observer = None
    report = Explanation(observer.lines, result)
    if not quiet:
        print(report)
    return report
