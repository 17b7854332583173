"""A profile in the Chrome trace format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dtorch.client.profile.measure import Span
from dtorch.client.profile.modules import Call
from dtorch.client.profile.timeline import Namer, WorkerTimeline
from dtorch.protocol import events as E

CLIENT = 1
WORKERS = 10
"""Process number of the first worker."""
_OPERATORS, _IDLE = 1, 2  # tracks of a worker
_CATEGORIES = {E.OPERATOR: "operator", E.RECORD: "record", E.COLLECTIVE: "collective", E.WORD: "collective"}
_SPANS = {"plan": "planning", "flush": "send a batch", "wait": "wait for workers"}
# Shorter gaps are not drawn; the summary counts them.
_SHORTEST_GAP_NS = 5_000


def client_events(spans: Iterable[Span], calls: Iterable[Call], namer: Namer, zero: int) -> Iterator[dict[str, Any]]:
    """The tracks of this process: one for what each of its threads does, one for the modules that it calls."""
    yield _name("process", CLIENT, 0, "client")
    threads: dict[int, int] = {}
    for call in calls:
        track = 2 * threads.setdefault(call.thread, len(threads) + 1)
        args = {"line": namer.line(call.site)} if call.site is not None else {}
        yield _complete(CLIENT, track, call.name, "module", call.start - zero, call.end - zero, args)
    for span in spans:
        track = 2 * threads.setdefault(span.thread, len(threads) + 1) + 1
        args = {"line": namer.line(span.site)} if span.site is not None else {}
        yield _complete(CLIENT, track, _SPANS[span.kind], span.kind, span.start - zero, span.end - zero, args)
    for number in threads.values():
        yield _name("thread", CLIENT, 2 * number, f"modules, thread {number}")
        yield _name("thread", CLIENT, 2 * number + 1, f"planning, sending, waiting, thread {number}")


def worker_events(timeline: WorkerTimeline, pid: int, zero: int) -> Iterator[dict[str, Any]]:
    """The tracks of one worker, as process ``pid``: what it runs, and where it has nothing to do."""
    yield _name("process", pid, 0, f"worker {timeline.worker} (devices {', '.join(map(str, timeline.devices))})")
    yield _name("thread", pid, _OPERATORS, "operators and collectives")
    yield _name("thread", pid, _IDLE, "idle")
    for event in timeline.events:
        if event.kind == E.BATCH:
            continue
        args = dict(event.args)
        if event.line:
            args["line"] = event.line
        if event.module:
            args["module"] = event.module
        if event.devices:
            args["devices"] = list(event.devices)
        if event.kind == E.COLLECTIVE:
            args["bytes"] = event.bytes
        category = _CATEGORIES.get(event.kind, "engine")
        yield _complete(pid, _OPERATORS, event.name, category, event.start - zero, event.end - zero, args)
    for start, end in timeline.idle:
        if end - start >= _SHORTEST_GAP_NS:
            yield _complete(pid, _IDLE, "idle", "idle", start - zero, end - zero, {})


def write(path: str | Path, events: Iterable[dict[str, Any]]) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.writelines(("" if k == 0 else ",\n") + json.dumps(event) for k, event in enumerate(events))
        file.write("\n]}\n")


def _complete(
    pid: int, tid: int, name: str, category: str, start: int, end: int, args: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """An event with a beginning and an end; the format wants microseconds."""
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category, "ts": start / 1000, "dur": (end - start) / 1000,
        "args": args,
    }  # fmt: skip


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{what}_name", "args": {"name": name}}
