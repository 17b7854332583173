"""What a profile says in tables: the share of each worker's time, and the operators that took most of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dtorch.client.profile.timeline import WorkerTimeline
from dtorch.protocol import events as E


@dataclass(frozen=True)
class WorkerShare:
    """Where the time of one worker went, in seconds.

    Attributes:
        wall: between beginning and end of the profile.
        operators: without the collectives within them.
        collectives: with waiting for the others in them.
        other: uploads, reads, loading, decoding of commands.
        idle: nothing to do.
        lost: number of events for which there was no room; their time counts as idle or other.
    """

    worker: int
    devices: tuple[int, ...]
    wall: float
    operators: float
    collectives: float
    other: float
    idle: float
    lost: int

    @property
    def attributed(self) -> float:
        """The share of the time that one of them accounts for, from 0 to 1; the rest is between operators."""
        return (self.operators + self.collectives + self.other + self.idle) / self.wall if self.wall else 1.0


@dataclass(frozen=True)
class OperatorTotal:
    """One operator at one line, all workers together.

    Attributes:
        kind: "operator" or "collective".
        count: how often workers ran it.
        seconds: of all workers, without what lies within.
        bytes: that crossed between devices, all together.
    """

    kind: str
    name: str
    line: str
    module: str
    count: int
    seconds: float
    bytes: int


def share_of(t: WorkerTimeline) -> WorkerShare:
    """Where a worker's time went."""
    return WorkerShare(
        worker=t.worker,
        devices=t.devices,
        wall=t.wall / 1e9,
        operators=t.own(E.OPERATOR) / 1e9,
        collectives=t.own(E.COLLECTIVE, E.WORD) / 1e9,
        other=t.own(E.COMMAND, E.DECODING, E.FREEING) / 1e9,
        idle=t.idle_ns / 1e9,
        lost=t.lost,
    )


def totals_of(timelines: Iterable[WorkerTimeline]) -> list[OperatorTotal]:
    """Operators and collectives by line, those that took longest first."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for timeline in timelines:
        for event in timeline.events:
            if event.kind in (E.OPERATOR, E.COLLECTIVE, E.WORD):
                kind = "operator" if event.kind == E.OPERATOR else "collective"
                row = found.setdefault((kind, event.name, event.line, event.module), [0, 0, 0])
                row[0] += 1
                row[1] += event.own
                row[2] += event.bytes // max(len(event.devices), 1)
    made = [OperatorTotal(*key, count, ns / 1e9, size) for key, (count, ns, size) in found.items()]
    return sorted(made, key=lambda total: -total.seconds)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 0) -> str:
    """Columns in line, the last ``left`` of them flush left."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    first = len(head) - left

    def text(line: list[str]) -> str:
        cells = (c.rjust(w) if k < first else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return "\n".join(map(text, lines))


def summary(shares: Sequence[WorkerShare], totals: Sequence[OperatorTotal], top: int) -> str:
    """Both tables as text."""

    def percent(part: float, whole: float) -> str:
        return f"{100 * part / whole:.1f} %" if whole else "-"

    by_worker = table(
        ["worker", "devices", "wall s", "operators", "collectives", "other", "idle", "attributed"],
        (
            [
                str(s.worker), ",".join(map(str, s.devices)), f"{s.wall:.3f}",
                *(percent(x, s.wall) for x in (s.operators, s.collectives, s.other, s.idle)),
                percent(s.attributed, 1),
            ]
            for s in shares
        ),
    )  # fmt: skip
    whole = sum(s.wall for s in shares)
    by_operator = table(
        ["ms", "share", "calls", "us a call", "operator", "module", "line"],
        (
            [
                f"{t.seconds * 1e3:.2f}", percent(t.seconds, whole), str(t.count), f"{t.seconds / t.count * 1e6:.1f}",
                t.name, t.module, t.line,
            ]
            for t in totals[:top]
        ),
        left=3,
    )  # fmt: skip
    lost = sum(s.lost for s in shares)
    note = f"\n\n{lost:,} events found no room on their workers and are missing." if lost else ""
    return f"{by_worker}\n\n{by_operator}{note}"
