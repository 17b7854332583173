"""What a profile suggests to change, with the line, and how much time it would save at most."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtorch.client.profile.measure import Issued, Span
from dtorch.client.profile.modules import Call
from dtorch.client.profile.timeline import Namer, WorkerTimeline
from dtorch.protocol import events as E

# A line that waits so often is taken for one within a loop; a module that is called so often for worth capturing.
_REPEATED = 3
# A call with fewer operators gains nothing from being captured.
_MANY_OPERATORS = 10
# What saves less than this share of the time is not worth a word.
_WORTH = 0.005
# A device that works less than this share of what the busiest does is called idle.
_IDLE_SHARE = 0.5


@dataclass(frozen=True)
class Advice:
    """One suggestion.

    Attributes:
        kind: "redistribution", "read", "capture" or "idle device".
        line: ``file:line`` in the user's program, "" if it is not known.
        gain: seconds of the profile that it would save at most.
        text: the suggestion.
    """

    kind: str
    line: str
    gain: float
    text: str

    def __str__(self) -> str:
        return f"{self.line or '?'}: {self.text} Saves at most {self.gain * 1e3:.1f} ms."


def advise(
    timelines: Sequence[WorkerTimeline],
    spans: Sequence[Span],
    calls: Sequence[Call],
    issued: Sequence[Issued],
    namer: Namer,
) -> list[Advice]:
    """All suggestions, the most promising first."""
    if not timelines:
        return []
    wall = max(t.wall for t in timelines) / 1e9
    found = [
        *redistributions(timelines),
        *reads(timelines, spans, namer),
        *uncaptured(timelines, spans, calls, issued, namer),
        *idle_devices(timelines),
    ]
    return sorted((a for a in found if a.gain >= _WORTH * wall), key=lambda a: -a.gain)


def redistributions(timelines: Sequence[WorkerTimeline]) -> Iterator[Advice]:
    """Operators that moved their inputs, unasked."""
    totals: dict[tuple[str, str, str, str, str], list[int]] = {}
    for timeline in timelines:
        for e in timeline.events:
            if e.kind == E.COLLECTIVE and e.implicit and e.bytes:
                key = e.line, e.args["for"], e.name, e.args["from"], e.args["to"]
                row = totals.setdefault(key, [0, 0, e.bytes])
                row[0] += 1
                row[1] += e.own
    for (line, op, kind, src, dst), (count, ns, size) in totals.items():
        yield Advice(
            "redistribution", line, ns / len(timelines) / 1e9,
            f"{op} redistributes an input by {kind.replace('_', '-')}, {count // len(timelines)} times {size:,} bytes: from "
            f"{src} to {dst}. Place the input so where it is made, or redistribute() it once for all that use it.",
        )  # fmt: skip


def reads(timelines: Sequence[WorkerTimeline], spans: Sequence[Span], namer: Namer) -> Iterator[Advice]:
    """Lines that wait for values again and again, while workers run out of work."""
    waits = sorted((s for s in spans if s.kind == "wait" and s.site is not None), key=lambda s: s.start)
    starts = [s.start for s in waits]
    count: dict[str, int] = {}
    gaps: dict[str, int] = {}
    for s in waits:
        count[namer.line(s.site)] = count.get(namer.line(s.site), 0) + 1
    for timeline in timelines:
        for start, end in timeline.idle:
            k = bisect_left(starts, start) - 1
            if k >= 0 and start <= waits[k].end:  # it had nothing more to do while the program waited
                line = namer.line(waits[k].site)
                gaps[line] = gaps.get(line, 0) + end - start
    for line, n in count.items():
        if n >= _REPEATED:
            yield Advice(
                "read", line, gaps.get(line, 0) / len(timelines) / 1e9,
                f"the program waits {n} times here for a value that only the workers know, and they run out of work. Keep "
                "the value on the mesh, or read it every so many turns, or with .to_torch_async() and later.",
            )  # fmt: skip


def uncaptured(
    timelines: Sequence[WorkerTimeline],
    spans: Sequence[Span],
    calls: Sequence[Call],
    issued: Sequence[Issued],
    namer: Namer,
) -> Iterator[Advice]:
    """Modules that the program issues operator by operator, too slowly for the workers."""
    waits = sorted((s.start, s.end) for s in spans if s.kind == "wait")
    times = [i.time for i in issued if i.within is None]
    found: dict[str, list[Call]] = {}
    for call in calls:
        if not call.depth:
            found.setdefault(call.name, []).append(call)
    for name, same in found.items():
        ranges = sorted((c.start, c.end) for c in same)
        operators = sum(bisect_left(times, end) - bisect_left(times, start) for start, end in ranges)
        if len(same) < _REPEATED or operators < _MANY_OPERATORS * len(same):
            continue
        starved = sum(_overlap(t.idle, ranges) - _overlap(_common(t.idle, waits), ranges) for t in timelines)
        yield Advice(
            "capture", namer.line(same[0].site), starved / len(timelines) / 1e9,
            f"{name} is issued {len(same)} times, {operators // len(same)} operators each, and workers wait for them. Wrap it "
            "in dtorch.capture(), or, where gradients are needed, the whole training step.",
        )  # fmt: skip


def idle_devices(timelines: Sequence[WorkerTimeline]) -> Iterator[Advice]:
    """Devices that do much less than the busiest."""
    busy: dict[int, int] = {d: 0 for t in timelines for d in t.devices}
    by_line: dict[tuple[int, str, str], int] = {}
    for timeline in timelines:
        for e in timeline.events:
            if e.kind == E.OPERATOR:
                for d in e.devices:
                    busy[d] = busy.get(d, 0) + e.own
                    key = d, e.line, e.name
                    by_line[key] = by_line.get(key, 0) + e.own
    if not busy or not max(busy.values()):
        return
    most = max(busy, key=lambda d: busy[d])
    mean = sum(busy.values()) / len(busy)
    for device, ns in busy.items():
        if ns < _IDLE_SHARE * busy[most]:
            lacking = {k: v - by_line.get((device, *k[1:]), 0) for k, v in by_line.items() if k[0] == most}
            _, line, op = max(lacking, key=lambda k: lacking[k])
            yield Advice(
                "idle device", line, (busy[most] - mean) / 1e9,
                f"device {device} computes {100 * ns / busy[most]:.0f} % of what device {most} does; most of the difference is "
                f"{op} here. Cut its inputs along a mesh axis on which device {device} lies.",
            )  # fmt: skip


def _common(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where two sorted lists of ranges overlap; those of ``b`` may overlap each other."""
    found, k = [], 0
    for start, end in a:
        while k < len(b) and b[k][1] <= start:
            k += 1
        at = start
        for low, high in b[k:]:
            if low >= end:
                break
            if min(high, end) > max(low, at):
                found.append((max(low, at), min(high, end)))
                at = min(high, end)
    return found


def _overlap(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> int:
    return sum(end - start for start, end in _common(a, b))
