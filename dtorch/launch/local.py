"""A session on this machine: the client's end of its connection, and the start and end of its processes.

    client ── starts ──> controller ── starts ──> template ── forks ──> workers

Each process ends with the one that started it, whatever ended that. The controller watches its connection to the
client; for those below the kernel does it (``dtorch.comm.lifetime``). The connections are socket pairs, so nobody else
can reach them and nothing of them can be left behind. A census pipe, whose write end all these processes hold and
nobody writes to, tells the client when the last of them is gone.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dtorch.comm.channel import Buffer, Channel, ChannelClosedError, Frame
from dtorch.comm.lifetime import describe_exit
from dtorch.core.errors import CommError, ControllerLostError, ProtocolError, SessionClosedError
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import PROTOCOL_VERSION, AddWorker, Fault, Hello, Shutdown, Welcome

_GRACE_S = 0.5
"""What workers get at ``close`` to leave what they are in."""
_WATCH_S = 1.0
"""How often a client that waits looks whether its controller still runs."""
_STOPPED_S = 2.0
"""A controller that a signal stopped for so long is ended."""

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the processes of a local session are started.

    Attributes:
        executor: ``module:name`` of what makes a worker's executor (``dtorch.worker.server.ExecutorFactory``).
        physical: the torch device type on which workers keep tensors.
        env: environment variables of all processes, on top of the client's.
        null_workers: if not 0, there are this many workers from the start, numbered from 0, each with the device of
            its number, which do no work (``dtorch.worker.null``); ``add_worker`` then gets none.
        restarts: how often in a row lost workers are started again before something new is done; 0: they stay lost.
        log_operators, log_bytes: above either a snapshot is taken, from which restarted workers begin.
    """

    executor: str = "dtorch.worker.executor:Executor"
    physical: str = "cpu"
    env: Mapping[str, str] = field(default_factory=dict)
    null_workers: int = 0
    restarts: int = 0
    log_operators: int = 30_000
    log_bytes: int = 1 << 30


class LocalLink:
    """A ``dtorch.comm.link.Link`` to a controller that is a child of this process.

    The constructor starts the controller and returns at once. What is sent before the processes are up reaches them
    when they are. At the end of the interpreter the link closes itself.

    Raises:
        CommError: no process can be started.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._owner_pid = os.getpid()
        self._closed = False
        self._death: str | None = None
        self._watched_s = time.monotonic()
        self._stopped_s: float | None = None
        self._welcomed = False
        self._resources = ExitStack()
        try:
            self._start(config)
        except BaseException as error:
            self._resources.close()
            if isinstance(error, OSError):
                raise CommError(f"the controller process cannot be started: {error}") from error
            raise
        atexit.register(self.close)
        self._channel.send([encode(Hello(PROTOCOL_VERSION))])

    def send(self, message: Sequence[Buffer]) -> None:
        """As ``Link.send``."""
        self._check_open()
        try:
            self._channel.send(message, idle=self._watch)
        except ChannelClosedError as error:
            raise self._dead() from error

    def receive(self, timeout_s: float | None) -> list[Frame] | None:
        """As ``Link.receive``."""
        self._check_open()
        started = time.monotonic()
        try:
            frames = self._next(timeout_s)
            if frames is not None and not self._welcomed:
                self._check_welcome(frames)
                frames = self._next(timeout_s and max(0.0, started + timeout_s - time.monotonic()))
        except ChannelClosedError as error:
            raise self._dead() from error
        return frames

    def add_worker(self, devices: Sequence[int], threads: int, env: Mapping[str, str]) -> None:
        """As ``Link.add_worker``."""
        self.send([encode(AddWorker(tuple(devices), threads, dict(env)))])

    def fileno(self) -> int:
        """As ``Link.fileno``."""
        return self._channel.fileno()

    def close(self, timeout_s: float = 5.0) -> None:
        """As ``Link.close``; what has not ended after ``timeout_s`` is killed."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout_s
        grace_s = min(_GRACE_S, timeout_s / 2)
        try:
            with suppress(CommError, ProtocolError):  # it has ended, does not read, or sends nonsense
                self._channel.send([encode(Shutdown(int(grace_s * 1000)))], timeout_s=timeout_s)
                while self._channel.receive(max(0.0, deadline - time.monotonic())) is not None:
                    pass  # what nobody waits for any more
        finally:
            try:
                self._process.kill()  # has no effect when it has ended by itself
                self._process.wait()
                _wait_readable(self._census, timeout_s=1.0)  # after a kill the others end within milliseconds
            finally:
                self._resources.close()

    def _start(self, config: LaunchConfig) -> None:
        """Make the session's directory, connections and controller; ``_resources`` undoes what has been made."""
        resources = self._resources
        self._session_dir = tempfile.mkdtemp(prefix="dtorch-")  # readable by this user alone
        resources.callback(shutil.rmtree, self._session_dir, ignore_errors=True)
        for name in ("peers", "snapshots"):
            os.mkdir(f"{self._session_dir}/{name}")
        with ExitStack() as childs:
            self._census, census = os.pipe()
            resources.callback(os.close, self._census)
            childs.callback(os.close, census)
            ours, theirs = socket.socketpair()
            self._channel = Channel(ours)
            resources.callback(self._channel.close)
            childs.callback(theirs.close)
            _links.add(self)
            resources.callback(_links.discard, self)
            self._process = self._launch(config, theirs.fileno(), census)

    def _launch(self, config: LaunchConfig, client_fd: int, census_fd: int) -> subprocess.Popen[bytes]:
        settings = {
            "client_fd": client_fd,
            "census_fd": census_fd,
            "session_dir": self._session_dir,
            "executor": config.executor,
            "physical": config.physical,
            "null_workers": config.null_workers,
            "restarts": config.restarts,
            "log_operators": config.log_operators,
            "log_bytes": config.log_bytes,
        }
        return self._run(
            "dtorch.controller", (json.dumps(settings),), (client_fd, census_fd), {**os.environ, **config.env}
        )

    @staticmethod
    def _run(
        module: str,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        environment: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a module of this package as a child that inherits these descriptors."""
        # The children import this very package, and nothing from the current directory.
        path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, environment.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", module, *arguments],
            env={**environment, "PYTHONPATH": path},
            pass_fds=descriptors,
            stdin=stdin,
            stdout=2,  # what workers print must not mix with the program's output
            start_new_session=True,
        )

    def _check_welcome(self, frames: list[Frame]) -> None:
        message = decode(frames[0])
        if isinstance(message, Fault):
            raise ProtocolError(message.text)
        if not isinstance(message, Welcome) or message.version != PROTOCOL_VERSION:
            raise ProtocolError(f"the controller answered the first message with {message!r:.200}")
        self._welcomed = True

    def _check_open(self) -> None:
        if os.getpid() != self._owner_pid:
            raise SessionClosedError(
                f"this process is a fork of process {self._owner_pid}, which owns the session; distributed tensors "
                "cannot be used in it"
            )
        if self._closed:
            raise SessionClosedError("the session has been shut down")
        if self._death is not None:
            raise ControllerLostError(self._death)

    def _next(self, timeout_s: float | None) -> list[Frame] | None:
        """As ``Channel.receive``, with an eye on the controller."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = _WATCH_S if end_s is None else min(_WATCH_S, max(0.0, end_s - time.monotonic()))
            frames = self._channel.receive(left_s)
            if frames is not None:
                return frames
            self._watch()
            if end_s is not None and time.monotonic() >= end_s:
                return None

    def _watch(self) -> None:
        """To be called now and then while nothing comes: a controller that a signal has stopped is ended.

        Raises:
            ControllerLostError: it was.
        """
        now_s = time.monotonic()
        if now_s - self._watched_s < _WATCH_S:
            return
        self._watched_s, process = now_s, self._process
        # Without WEXITED the process is not collected here, and WNOWAIT leaves it in the state that is asked for.
        if process.returncode is None and os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
            self._stopped_s = now_s if self._stopped_s is None else self._stopped_s
            if now_s - self._stopped_s >= _STOPPED_S:
                process.kill()
                raise self._dead(f"was stopped by a signal, did not go on within {_STOPPED_S:g} s, and")
        else:
            self._stopped_s = None

    def _dead(self, before: str = "") -> ControllerLostError:
        """Note that, and how, the controller has ended."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:  # it has closed the connection and lives on
            self._process.kill()
            code = self._process.wait()
        self._death = (
            f"the controller process (pid {self._process.pid}) {before and before + ' '}ended with {describe_exit(code)}; "
            "its workers, and the tensors in them, are gone with it; start a new session"
        )
        return ControllerLostError(self._death)

    def _abandon(self) -> None:
        """In a fork of the owner: let go of everything that would keep the session alive."""
        self._channel.close()
        os.close(self._census)


_links: weakref.WeakSet[LocalLink] = weakref.WeakSet()
"""Links that hold descriptors in this process."""


def _abandon_links() -> None:
    for link in list(_links):
        link._abandon()
    _links.clear()


os.register_at_fork(after_in_child=_abandon_links)


def _wait_readable(descriptor: int, timeout_s: float) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    poller.poll(timeout_s * 1000)
