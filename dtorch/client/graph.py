"""Sessions of this process: the default one, started on first use, and further ones side by side."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from dtorch.client.session import Session
from dtorch.core.config import SessionConfig, from_environment
from dtorch.core.errors import DtorchError
from dtorch.core.mesh import DeviceMesh, forget_first_mesh
from dtorch.protocol import commands as C

_lock = threading.RLock()
_default: list[Session] = []
_all: list[Session] = []
_current: ContextVar[Session | None] = ContextVar("dtorch_current_session", default=None)
# Set by dtorch.api: makes the link of a configuration. The client knows no processes.
make_link: Callable[[SessionConfig], Any] | None = None
# Called with each new session.
started: list[Callable[[Session], None]] = []
# Called before a session ends on purpose.
before_end: list[Callable[[], None]] = []


def start(config: SessionConfig) -> Session:
    """A new session."""
    assert make_link is not None, "dtorch.api sets how links are made"
    with _lock:
        session = Session(make_link(config), config)
        if config.memory_limit is not None:
            session.define(C.LIMIT, config.memory_limit)
        _all.append(session)
        for tell in started:
            tell(session)
        return session


def init(**options: Any) -> Session:
    """Start the default session with these options, see ``SessionConfig``.

    Raises:
        DtorchError: it is running already with other options.
    """
    with _lock:
        running = _running()
        config = from_environment(**options)
        if running is not None:
            if config == running.config:
                return running
            raise DtorchError(
                f"dtorch already runs in mode {running.config.mode!r} with other options. "
                "Call dtorch.shutdown() first, or init() before the first use."
            )
        session = start(config)
        _default[:] = [session]
        return session


def _running() -> Session | None:
    return _default[0] if _default and _default[0].closed is None else None


def default_session() -> Session:
    """The default session, started on first use. In a fork of the program it is the closed one of the parent."""
    with _lock:
        if _default and (_default[0].closed is None or _default[0].pid != os.getpid()):
            return _default[0]
        return init()


def current_session() -> Session:
    """The session of the innermost ``with graph:``, else the default one."""
    return _current.get() or default_session()


def session_of(mesh: DeviceMesh) -> Session:
    """The session that owns a mesh; an unowned mesh goes to the current one."""
    owner = mesh._graph
    if isinstance(owner, Session) and owner.closed is None:
        return owner
    return current_session()


def sessions() -> list[Session]:
    """All sessions of this process that are running."""
    with _lock:
        return [s for s in _all if s.closed is None]


def shutdown() -> None:
    """End all sessions; nothing is left running. The next use starts afresh."""
    _prepare_end()
    with _lock:
        running, _all[:] = list(_all), []
        _default.clear()
        forget_first_mesh()
    for session in running:
        session.close()


def _prepare_end() -> None:
    for prepare in before_end:
        prepare()


atexit.register(shutdown)


class Graph:
    """A session of its own: its operators run on its own workers, beside those of other graphs.

    Args:
        options: see ``dtorch.init``.

    ``with graph:`` makes it current; meshes first used inside belong to it.
    """

    def __init__(self, _session: Session | None = None, **options: Any) -> None:
        self.session = _session or start(from_environment(**options))

    @staticmethod
    def default_graph() -> Graph:
        """The default session as a graph."""
        return Graph(_session=current_session())

    @contextlib.contextmanager
    def device_mesh_guard(self, mesh: DeviceMesh) -> Iterator[DeviceMesh]:
        """Within the block, ``mesh`` is the default mesh and this graph is current."""
        token = _current.set(self.session)
        try:
            self.session.layout(mesh)
            with mesh:
                yield mesh
        finally:
            _current.reset(token)

    def __enter__(self) -> Graph:
        self._token = _current.set(self.session)
        return self

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)

    def synchronize(self) -> None:
        """Wait for everything issued so far; raises what failed on the way."""
        self.session.synchronize()

    def close(self) -> None:
        """End the session."""
        _prepare_end()
        self.session.close()
