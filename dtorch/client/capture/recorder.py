"""Notes everything that a session sends while one call runs."""

from __future__ import annotations

import random as python_random
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.client import random
from dtorch.client.handle import Handle
from dtorch.client.session import Session
from dtorch.client.sites import Site, thread_of


class Recorder:
    """The stream of one session from ``start`` to ``stop``.

    Attributes:
        batches: commands and frames, in order.
        sites: where each operator was issued.
        first_id: tensors made meanwhile have larger ids.
        blocks: what a replay could not do, and where.
        copies: handles whose host copies the program looked at, with their ids then, and where.
        sources: plain tensors that were uploaded, and their versions then.
        homes: stream of random numbers -> mesh of its last draw before.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.batches: list[tuple[list[Any], Sequence[Any]]] = []
        self.sites: list[Site] = []
        self.blocks: list[tuple[str, Site]] = []
        self.copies: list[tuple[int, Callable[[], Handle | None], Site]] = []
        self.sources: list[tuple[torch.Tensor, int]] = []

    def start(self, alone: bool) -> None:
        """Begin; ``alone`` if no other session could own a generator's state."""
        session = self.session
        for stream in random.every_stream(session) if alone else [random.streams(session).default]:
            random.settle(session, stream)
        self.homes = {stream: stream.home for stream in random.every_stream(session)}
        self._host = _host_randomness()
        with session.lock:
            session.flush()
            self.first_id, self._seen = session.ids(), session.issued
            self._noted = session.sites.notes_threads
            session.sites.note_threads()
            session.recorder = self

    def flush(self) -> None:
        """Take in what has not been sent yet."""
        self.session.flush()

    def stop(self) -> None:
        """The call has returned, or failed."""
        session = self.session
        with session.lock:
            try:
                if session.closed is None:
                    session.flush()
            finally:
                session.recorder = None
                if not self._noted:
                    session.sites.note_no_threads()  # which costs every operator a little

    # -- called by the session --------------------------------------------------------------------------------------
    def sent(self, commands: list[Any], frames: Sequence[Any]) -> None:
        """A batch leaves."""
        self.batches.append((commands, frames))
        new, sites = self.session.issued - self._seen, self.session.sites
        self._seen += new
        self.sites.extend(sites[i] for i in range(len(sites) - new, len(sites)))

    def block(self, reason: str, site: Site) -> None:
        """Something happens that no record can hold."""
        self.blocks.append((reason, site))

    def reads_copy(self, handle: Handle, site: Site) -> None:
        """The program looks at a host copy."""
        self.copies.append((handle.id, weakref.ref(handle), site))

    def uploads(self, source: torch.Tensor) -> None:
        """A plain tensor is uploaded; the alias shows whether it is written later."""
        if not source.is_inference():
            with torch.no_grad():
                self.sources.append((source.detach(), source._version))

    # -- afterwards -------------------------------------------------------------------------------------------------
    def drew_on_host(self) -> bool:
        """Whether the call drew random numbers of this process."""
        return any(a is not b and not _equal(a, b) for a, b in zip(self._host, _host_randomness(), strict=True))

    def is_alone(self) -> bool:
        """Whether only this thread has issued operators meanwhile."""
        return all(thread_of(site) == threading.get_ident() for site in self.sites)

    def seeded(self) -> bool:
        """Whether the call has seeded a generator that nothing has drawn from since."""
        return any(stream.seed is not None for stream in random.every_stream(self.session))


def _host_randomness() -> list[Any]:
    found: list[Any] = [python_random.getstate(), torch.default_generator.get_state()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append(str(numpy.random.get_state()[1:3]) + str(numpy.random.get_state()[1][:8]))
    return found


def _equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else bool(a == b)
