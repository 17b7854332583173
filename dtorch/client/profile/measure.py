"""What is noted of one session while a profile runs. Nothing here is in the way of a session that is not profiled."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic_ns
from typing import Any, NamedTuple

import msgpack

from dtorch.client import dispatch
from dtorch.client.profile.modules import Modules
from dtorch.client.request import Request
from dtorch.client.session import Session
from dtorch.client.sites import Site, caller
from dtorch.core.errors import DtorchError
from dtorch.core.spec import TensorSpec
from dtorch.protocol import commands as C
from dtorch.protocol import events as E

# After so many operators the workers are asked for what they have measured, so that they need not keep it.
_PORTION = 50_000


@dataclass(frozen=True, slots=True)
class Span:
    """Something that the client did or waited for: ``plan``, ``flush`` or ``wait``. Times in nanoseconds."""

    kind: str
    start: int
    end: int
    thread: int
    site: Site | None


class Issued(NamedTuple):
    """An operator as the client issued it; where it runs a record, ``within`` has the sites of the record's operators."""

    site: Site
    time: int
    module: str | None
    within: list[Site] | None


@dataclass
class Measured:
    """What one worker has told.

    Attributes:
        begin, end: of measuring, nanoseconds of this process's clock.
        rows: as in ``protocol.events``, but the number of the operator within a record, or -1, is put before the times, and
            replays are rows as well. Times are of this process's clock; sorted by nobody.
        steps: (kind, mesh axis, source, target) of each redistribution step that rows name.
        lost: number of rows for which there was no room.
    """

    begin: int = 0
    end: int = 0
    rows: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[tuple[str, int, TensorSpec, TensorSpec]] = field(default_factory=list)
    lost: int = 0


class Measuring:
    """Measures one session from ``start`` to ``stop``.

    Attributes:
        spans: what the client did.
        first: serial of the first operator in ``issued``.
        workers: by number.
    """

    def __init__(self, session: Session, modules: Modules) -> None:
        self.session, self._modules = session, modules
        self.spans: list[Span] = []
        self._issued: list[Any] = []  # flat: objects that stay keep the garbage collector busy
        self.first = 0
        self.workers: dict[int, Measured] = {}
        self._requests: list[tuple[Request, int, int]] = []  # with the times of asking and of the answer
        self._asked = self._expected = 0

    @property
    def issued(self) -> list[Issued]:
        """The operators in order."""
        flat = self._issued
        return [Issued(*flat[k : k + 4]) for k in range(0, len(flat), 4)]

    def start(self) -> None:
        """Begin to measure, here and on the workers."""
        session = self.session
        with session.lock:
            self._noted = session.sites.notes_threads
            self.first = session.issued
            session.sites.note_in(self._note)
            for name in ("flush", "wait"):
                setattr(session, name, self._timed(getattr(session, name), name))
        self._ask(True)

    def stop(self) -> None:
        """Measure no longer, and wait for what the workers have measured. A session that is over keeps what it has told."""
        session = self.session
        del session.flush, session.wait  # those of the class are in force again
        session.sites.note_no_threads()
        if self._noted:
            session.sites.note_threads()
        self.collect(goes_on=False)
        for request, asked, answered in self._requests:
            for worker, data in request.parts.items():
                self._take(worker, data, asked, answered)

    def collect(self, goes_on: bool = True) -> None:
        """Wait for what the workers have measured so far."""
        with contextlib.suppress(DtorchError):  # it is over, and its users are told by what they do with it
            self.session.flush()
            self._ask(goes_on)
            for request, _, _ in self._requests:
                self.session.wait(request, None)

    def _note(self, site: Site, within: list[Site] | None) -> None:
        self._issued.extend((site, monotonic_ns(), self._modules.current(), within))
        self._asked += 1 if within is None else len(within)

    def _timed(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._expected != self.session.worker_count:
                self._ask(True)  # first of all, so that new workers measure all that they do
            sends = kind == "wait" or bool(self.session.buf)
            site = caller(sys._getframe(1)) if kind == "wait" else None
            start = monotonic_ns()
            try:
                return call(*args, **kwargs)
            finally:
                if sends:
                    self.spans.append(Span(kind, start, monotonic_ns(), get_ident(), site))
                if self._asked > _PORTION:
                    self._ask(True)

        return run

    def _ask(self, goes_on: bool) -> None:
        """Ask every worker for what it has measured since the last time."""
        session = self.session
        if session.recorder is not None:
            return  # a record is being made, in which this has no place
        self._asked, self._expected = 0, session.worker_count
        if not self._expected or session.config.null_workers:
            return  # nobody answers
        with session.lock:
            number, request = session.request(self._expected)
            place = len(self._requests)
            self._requests.append((request, monotonic_ns(), 0))
            request.callbacks.append(lambda: self._answered(place))
            session._send([C.PROFILE, number, goes_on], [], 0)

    def _answered(self, place: int) -> None:
        request, asked, _ = self._requests[place]
        self._requests[place] = request, asked, monotonic_ns()

    def _take(self, worker: int, data: Any, asked: int, answered: int) -> None:
        begin, now, lost, steps, records, rows, replays = msgpack.unpackb(data, strict_map_key=False)
        # Clocks of one machine are one; another's is taken to have been read half way between question and answer.
        up = self.session.workers.get(worker)
        shift = 0 if up is None or up.host == socket.gethostname() else (asked + answered) // 2 - now
        found = self.workers.setdefault(worker, Measured(begin + shift))
        found.end, found.lost = now + shift, lost
        specs = self.session.known_specs()
        found.steps = [(kind, axis, specs[src], specs[dst]) for kind, axis, src, dst in steps]
        for k in range(0, len(rows), E.WIDTH):
            kind, number, serial, start, end = rows[k : k + E.WIDTH]
            found.rows.append((kind, number, serial, -1, start + shift, end + shift))
        for number, serial, start, end, *ends in replays:
            found.rows.append((E.RECORD, number, serial, -1, start + shift, end + shift))
            plans, before = records[number], start
            for plan, within, after in zip(plans[::2], plans[1::2], ends, strict=False):
                if plan >= 0:
                    found.rows.append((E.OPERATOR, plan, serial, within, before + shift, after + shift))
                before = after


class Planning:
    """Times the making of plans, of all sessions."""

    def __init__(self, spans_of: Callable[[Session], list[Span] | None]) -> None:
        self._spans_of = spans_of

    def start(self) -> None:
        """Begin."""
        self._make = dispatch.make_ready
        dispatch.make_ready = self._timed  # type: ignore[assignment]

    def stop(self) -> None:
        """End."""
        dispatch.make_ready = self._make

    def _timed(self, cls: Any, session: Session, *args: Any) -> Any:
        site, start = caller(sys._getframe(1)), monotonic_ns()
        try:
            return self._make(cls, session, *args)
        finally:
            spans = self._spans_of(session)
            if spans is not None:
                spans.append(Span("plan", start, monotonic_ns(), get_ident(), site))
