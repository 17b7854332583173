"""``dtorch.profile``: what the program and its workers do, and when."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtorch.client import graph
from dtorch.client.profile import trace
from dtorch.client.profile.advice import Advice, advise
from dtorch.client.profile.measure import Measuring, Planning, Span
from dtorch.client.profile.modules import Modules
from dtorch.client.profile.report import OperatorTotal, WorkerShare, share_of, summary, totals_of
from dtorch.client.profile.timeline import Namer, WorkerTimeline
from dtorch.client.session import Session
from dtorch.core.errors import DtorchError

__all__ = ["Advice", "OperatorTotal", "WorkerShare", "profile"]

_running: list[profile] = []


class profile:
    """Measures what happens within a ``with`` block, in this program and on all workers, and writes one timeline of it.

    The block's end waits until the workers have done what was asked of them. Sessions that begin within the block are
    measured too.

    Times on CUDA devices are those of the worker's host, which issues kernels ahead of the device.

    Args:
        path: file to write, in Chrome's trace format, which https://ui.perfetto.dev opens; ``None``: none.

    Raises:
        DtorchError: on entering: another profile is running.
        OSError: on leaving: the file cannot be written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = path
        self._modules = Modules()
        self._planning = Planning(self._spans_of)
        self._measuring: list[Measuring] = []
        self._parts: list[tuple[Measuring, Namer, list[WorkerTimeline]]] = []

    def __enter__(self) -> profile:
        if _running:
            raise DtorchError("A profile is running already; leave its with block first.")
        _running.append(self)
        for session in graph.sessions():
            self._follow(session)
        graph.started.append(self._follow)
        graph.before_end.append(self._collect)
        self._planning.start()
        self._modules.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._modules.stop()
        self._planning.stop()
        graph.started.remove(self._follow)
        graph.before_end.remove(self._collect)
        _running.remove(self)
        for measuring in self._measuring:
            measuring.stop()
            namer = Namer(measuring)
            workers = [namer.timeline(k, measured) for k, measured in sorted(measuring.workers.items())]
            self._parts.append((measuring, namer, workers))
        if self._path is not None:
            trace.write(self._path, self._events())

    def _follow(self, session: Session) -> None:
        measuring = Measuring(session, self._modules)
        self._measuring.append(measuring)
        measuring.start()

    def _collect(self) -> None:
        for measuring in self._measuring:
            measuring.collect()

    def _spans_of(self, session: Session) -> list[Span] | None:
        return next((m.spans for m in self._measuring if m.session is session), None)

    def _events(self) -> Iterator[dict[str, Any]]:
        starts = [t.begin for _, _, workers in self._parts for t in workers]
        starts += [s.start for m, _, _ in self._parts for s in m.spans] + [c.start for c in self._modules.calls]
        zero = min(starts, default=0)
        first = trace.WORKERS
        for k, (measuring, namer, workers) in enumerate(self._parts):
            calls = () if k else self._modules.calls
            yield from trace.client_events(measuring.spans, calls, namer, zero)
            for timeline in workers:
                yield from trace.worker_events(timeline, first + timeline.worker, zero)
            first += max((t.worker + 1 for t in workers), default=0)

    # -- what it says -----------------------------------------------------------------------------------------------
    @property
    def workers(self) -> list[WorkerShare]:
        """Where the time of each worker went."""
        return [share_of(t) for _, _, workers in self._parts for t in workers]

    @property
    def operators(self) -> list[OperatorTotal]:
        """Operators and collectives by line, those that took longest first."""
        return totals_of(itertools.chain.from_iterable(workers for _, _, workers in self._parts))

    def summary(self, top: int = 20) -> str:
        """Two tables: the time of each worker, and the ``top`` operators and collectives."""
        return summary(self.workers, self.operators, top)

    def advice(self) -> list[Advice]:
        """Hidden redistributions, reads within loops, modules worth capturing, idle devices; most promising first."""
        found = [
            a
            for measuring, namer, workers in self._parts
            for a in advise(workers, measuring.spans, self._modules.calls, measuring.issued, namer)
        ]
        return sorted(found, key=lambda a: -a.gain)
