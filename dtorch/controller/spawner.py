"""Start and end worker processes on this machine: through the template, or all null workers in one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dtorch.comm.lifetime import describe_exit
from dtorch.controller.loop import Loop
from dtorch.core.errors import ProtocolError
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import (
    AddWorker,
    Exited,
    Fork,
    Forked,
    Kill,
    Message,
    Stop,
    Stopped,
    TemplateFailed,
    TemplateReady,
)

Report = Callable[[Forked | Exited | Stopped], None]

_TEMPLATE_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",  # idle threads of one worker must not spin on the cores of another
}
MAX_REPORT_BYTES = 1 << 18  # more than a SEQPACKET socket takes
_STOPPED_S = 1.0
"""A template that a signal stopped for so long is ended."""


class Spawner(Protocol):
    """What the server needs of whoever makes worker processes. Everything is reported through a callback."""

    stopped: bool
    """No process of it is left, after ``stop``."""

    def start(self, index: int, request: AddWorker, connection: socket.socket, generation: int) -> None:
        """Start a worker that owns ``connection``; ``Forked`` or ``Exited`` follows."""

    def kill(self, index: int) -> None:
        """Kill a worker unless it has ended; ``Exited`` follows if it has not been reported."""

    def check(self, now_s: float) -> None:
        """Look whether it still works; to be called a few times a second while anything happens."""

    def stop(self, grace_ms: int) -> None:
        """Begin to end everything, by force after ``grace_ms``."""

    def abandon(self) -> None:
        """End everything at once."""


class TemplateSpawner:
    """Lets a template process fork the workers.

    The template is started ahead of the first request, since its imports take long, and again by the next request when
    it has died. It gets one request at a time, so neither side ever waits for the other to read.

    Args:
        loop: where its connection is watched.
        report: called with what happened to workers.
        settings: passed on to the template: ``executor``, ``physical`` and ``peers_dir``.
        census_fd: inherited by all processes, see ``dtorch.launch.local``.
    """

    def __init__(self, loop: Loop, report: Report, settings: Mapping[str, str], census_fd: int) -> None:
        self.stopped = False
        self._loop, self._report = loop, report
        self._settings, self._census_fd = settings, census_fd
        self._requests: deque[tuple[Fork, socket.socket]] = deque()
        self._living: set[int] = set()  # asked for, and not reported as ended
        self._forking: int | None = None
        self._ready = False
        self._failure: str | None = None
        self._stopped_s: float | None = None
        self._launch()

    def start(self, index: int, request: AddWorker, connection: socket.socket, generation: int) -> None:
        """As ``Spawner.start``."""
        if self._process is None:
            self._launch()
        self._living.add(index)
        self._requests.append((Fork(index, request.devices, request.threads, request.env, generation), connection))
        self._send_request()

    def kill(self, index: int) -> None:
        """As ``Spawner.kill``."""
        waiting = next((pair for pair in self._requests if pair[0].index == index), None)
        if waiting is not None:
            self._requests.remove(waiting)
            waiting[1].close()
            self._on_exited(Exited(index, "it was not started"))
        elif index in self._living:
            self._tell(Kill(index))

    def check(self, now_s: float) -> None:
        """As ``Spawner.check``: a template that a signal has stopped is ended, and its workers with it."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        # Without WEXITED the process is not collected here, and WNOWAIT leaves it in the state that is asked for.
        if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is None:
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        elif now_s - self._stopped_s >= _STOPPED_S:
            self._failure = (
                f"a signal stopped the template process (pid {process.pid}), which was ended with its workers"
            )
            process.kill()

    def stop(self, grace_ms: int) -> None:
        """As ``Spawner.stop``."""
        self._requests.clear()
        if self._process is None:
            self.stopped = True
        elif self._ready:
            self._tell(Stop(grace_ms))
        else:
            self.abandon()  # it is importing, and has no workers

    def abandon(self) -> None:
        """As ``Spawner.abandon``: the workers end with the template."""
        if self._process is not None:
            self._process.kill()
            self._ended()
        self.stopped = True

    def _launch(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, self._lifeline = os.pipe()
        settings = {
            **self._settings,
            "control_fd": theirs.fileno(),
            "lifeline_fd": read_end,
            "census_fd": self._census_fd,
        }
        # OpenBLAS would start its threads when numpy is imported, and a process with threads must not fork.
        environment = {**_TEMPLATE_ENVIRONMENT, **os.environ, "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "dtorch.launch.template", json.dumps(settings)],
            env=environment,
            pass_fds=(theirs.fileno(), read_end, self._census_fd),
            start_new_session=True,
        )
        theirs.close()
        os.close(read_end)
        self._ready, self._failure, self._forking, self.stopped = False, None, None, False
        self._stopped_s = None
        self._loop.watch(self._control, self._on_ready)

    def _tell(self, message: Message, connections: Sequence[socket.socket] = ()) -> str | None:
        """Send the template a message with descriptors; returns why that failed, if it did."""
        try:
            socket.send_fds(self._control, [encode(message)], [c.fileno() for c in connections])
        except OSError as error:  # it has died, which its connection tells next, or the message is too long
            return f"the template process was not reached: {error}"
        return None

    def _send_request(self) -> None:
        while self._ready and self._forking is None and self._requests:
            fork, connection = self._requests.popleft()
            self._forking = fork.index
            failure = self._tell(fork, [connection])
            connection.close()
            if failure is not None:
                self._on_exited(Exited(fork.index, failure))

    def _on_ready(self, readable: bool, writable: bool) -> None:
        try:
            data = self._control.recv(MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._ended()
            return
        message = decode(data)
        if isinstance(message, TemplateReady):
            self._ready = True
        elif isinstance(message, TemplateFailed):
            self._failure = message.text
        elif isinstance(message, Forked):
            self._forking = None
            self._report(message)
        elif isinstance(message, Stopped):
            self._report(message)
        elif isinstance(message, Exited):
            self._on_exited(message)
        else:
            raise ProtocolError(f"the template does not send {type(message).__name__}")
        self._send_request()

    def _on_exited(self, message: Exited) -> None:
        if self._forking == message.index:
            self._forking = None
        self._living.discard(message.index)
        self._report(message)

    def _ended(self) -> None:
        """The template is gone, and with it all its workers."""
        process, self._process = self._process, None
        assert process is not None, "a template ends once"
        reason = describe_exit(process.wait())
        self._loop.unwatch(self._control)
        self._control.close()
        os.close(self._lifeline)
        self.stopped = True
        text = self._failure or f"the template process (pid {process.pid}) ended with {reason}, and its workers with it"
        for _, connection in self._requests:
            connection.close()
        self._requests.clear()
        for index in sorted(self._living):
            self._on_exited(Exited(index, text))


class NullSpawner:
    """Hosts all null workers in one process, for measuring everything but the work.

    Args:
        report: called with what happened to workers.
        connections: the workers' ends of their channels, by index; closed here.
        census_fd: inherited by the process, see ``dtorch.launch.local``.
    """

    def __init__(self, report: Report, connections: Sequence[socket.socket], census_fd: int) -> None:
        self.stopped = False
        self._report = report
        read_end, self._lifeline = os.pipe()
        descriptors = [connection.fileno() for connection in connections]
        settings = {"lifeline_fd": read_end, "connections": descriptors}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "dtorch.worker.null", json.dumps(settings)],
            pass_fds=(*descriptors, read_end, census_fd),
            start_new_session=True,
        )
        os.close(read_end)
        for connection in connections:
            connection.close()

    def start(self, index: int, request: AddWorker, connection: socket.socket, generation: int) -> None:
        """As ``Spawner.start``."""
        connection.close()
        self._report(Exited(index, "a session of null workers takes no others"))

    def kill(self, index: int) -> None:
        """As ``Spawner.kill``, but they all end."""
        self._process.kill()
        self._report(Exited(index, f"the process of the null workers ended with {describe_exit(self._process.wait())}"))

    def check(self, now_s: float) -> None:
        """As ``Spawner.check``; null workers are for measuring, which may stop them."""

    def stop(self, grace_ms: int) -> None:
        """As ``Spawner.stop``; null workers have nothing to leave."""
        self.abandon()

    def abandon(self) -> None:
        """As ``Spawner.abandon``."""
        self._process.kill()
        self._process.wait()
        os.close(self._lifeline)
        self.stopped = True
