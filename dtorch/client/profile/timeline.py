"""The rows of a worker as events with names, user lines and modules, and the time of each without what lies within it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dtorch.client.profile.measure import Issued, Measured, Measuring
from dtorch.client.sites import Site, describe
from dtorch.core.spec import MeshLayout
from dtorch.core.steps import Step
from dtorch.planner.redistribute import step_bytes
from dtorch.protocol import commands as C
from dtorch.protocol import events as E

# Of two rows that begin and end together the one further to the left lies around the other.
_AROUND = {E.BATCH: 0, E.RECORD: 1}
_COMMANDS = {
    C.PUT: "upload", C.FETCH: "read values", C.LOAD: "load weights", C.PLAN: "take a plan", C.RECORD: "take a record",
    C.WRITE: "write a file", C.SYNC: "synchronize", C.PROFILE: "report measurements",
}  # fmt: skip


@dataclass(slots=True)
class Event:
    """Something that a worker did. Times in nanoseconds of this process's clock.

    Attributes:
        kind: one of ``protocol.events``.
        own: its time without that of events within it.
        serial: of the operator, -1 if it is none.
        line: ``file:line`` of the user's program, "" if it is not known.
        devices: those of the worker on which it ran.
        bytes: that cross between devices, of a collective; all devices together.
        args: more about it, for the trace.
    """

    kind: int
    name: str
    start: int
    end: int
    own: int
    serial: int = -1
    line: str = ""
    module: str = ""
    devices: tuple[int, ...] = ()
    bytes: int = 0
    implicit: bool = False
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class WorkerTimeline:
    """One worker's events, in order of their beginnings.

    Attributes:
        begin, end: of measuring, in nanoseconds.
        idle: the gaps (start, end) between batches.
        lost: number of events for which there was no room.
    """

    worker: int
    devices: tuple[int, ...]
    begin: int
    end: int
    events: list[Event]
    idle: list[tuple[int, int]]
    lost: int

    @property
    def wall(self) -> int:
        """The time from the beginning to the end."""
        return self.end - self.begin

    def own(self, *kinds: int) -> int:
        """Time spent in events of these kinds, without what lies within them."""
        return sum(self._by_kind.get(kind, 0) for kind in kinds)

    @cached_property
    def _by_kind(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for event in self.events:
            found[event.kind] = found.get(event.kind, 0) + event.own
        return found

    @property
    def idle_ns(self) -> int:
        """Time without anything to do."""
        return sum(end - start for start, end in self.idle)


class Namer:
    """Names of what rows say by numbers, for one session."""

    def __init__(self, measuring: Measuring) -> None:
        self._measuring, session = measuring, measuring.session
        self._plans, self._operators = session.wire_plans, measuring.issued
        self._meshes: dict[int, MeshLayout] = {s.mesh.id: s.mesh for s in session.known_specs().values()}
        self._hosts = session._device_worker
        self._lines: dict[Any, str] = {}
        self._here: dict[tuple[int, int], tuple[int, ...]] = {}

    def timeline(self, worker: int, measured: Measured) -> WorkerTimeline:
        """The events of a worker."""
        events: list[Event] = []
        stack: list[Event] = []
        idle, free = [], measured.begin
        rows = sorted(measured.rows, key=lambda r: (r[4], -r[5], _AROUND.get(r[0], 2 + (r[0] != E.OPERATOR))))
        for kind, number, serial, within, start, end in rows:
            while stack and stack[-1].end <= start:
                stack.pop()
            around = stack[-1] if stack else None
            event = Event(kind, "", start, end, end - start, serial)
            self._name(event, number, within, worker, measured, around)
            if around is not None:
                around.own -= event.own
            if kind == E.BATCH:
                if start > free:
                    idle.append((free, start))
                free = max(free, end)
            events.append(event)
            stack.append(event)
        if measured.end > free:
            idle.append((free, measured.end))
        devices = tuple(sorted(d for d, w in self._hosts.items() if w == worker))
        return WorkerTimeline(worker, devices, measured.begin, measured.end, events, idle, measured.lost)

    def line(self, site: Site | None) -> str:
        """``file:line``."""
        if site is None:
            return ""
        key = site[:2]
        if key not in self._lines:
            self._lines[key] = describe(site)
        return self._lines[key]

    def _name(
        self, event: Event, number: int, within: int, worker: int, measured: Measured, around: Event | None
    ) -> None:
        kind = event.kind
        if kind == E.OPERATOR:
            data = self._plans[number]
            event.name = short_name(data[0])
            event.devices = self._devices(data[1], worker)
            event.args = {"plan": number}
            self._place(event, within)
        elif kind == E.RECORD:
            event.name, event.args = "captured call", {"record": number}
            self._place(event, -1)
        elif kind in (E.COLLECTIVE, E.WORD):
            step = Step(*measured.steps[number])
            event.name = step.kind if kind == E.COLLECTIVE else "wait for the giver"
            if around is not None:
                event.serial, event.line, event.module, event.devices = (
                    around.serial, around.line, around.module, around.devices,
                )  # fmt: skip
                event.implicit = around.name != _REDISTRIBUTE
                event.args = {"for": around.name}
            event.args["from"], event.args["to"] = str(step.src), str(step.dst)
            event.bytes = step_bytes(step) if kind == E.COLLECTIVE else 0
        elif kind == E.COMMAND:
            event.name = _COMMANDS.get(number, "bookkeeping")
            if number != C.LOAD:
                event.serial = -1
        else:
            event.name = {E.DECODING: "decode a batch", E.FREEING: "free memory", E.BATCH: "batch"}[kind]

    def _issued(self, serial: int) -> Issued | None:
        index = serial - self._measuring.first
        return self._operators[index] if 0 <= index < len(self._operators) else None

    def _place(self, event: Event, within: int) -> None:
        """Where in the program the operator stands. Of a record's operators the function is known, not the module."""
        issued = self._issued(event.serial)
        if issued is None:
            return
        site = issued.site
        if within >= 0 and issued.within is not None:
            site = issued.within[within]
            event.module = ".".join(filter(None, (issued.module, site[0].co_qualname)))
        else:
            event.module = issued.module or site[0].co_qualname
        event.line = self.line(site)

    def _devices(self, mesh: int, worker: int) -> tuple[int, ...]:
        key = mesh, worker
        if key not in self._here:
            layout = self._meshes.get(mesh)
            devices = () if layout is None else layout.devices
            self._here[key] = tuple(d for d in devices if self._hosts.get(d) == worker)
        return self._here[key]


_REDISTRIBUTE = "redistribute"


def short_name(op: str) -> str:
    """The operator without its overload, and without torch's own namespace."""
    return op.removeprefix("aten::").partition(".")[0] or _REDISTRIBUTE
