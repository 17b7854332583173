"""Workers on other machines: whoever manages the pool starts and ends them for a session's controller."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from dtorch.controller.loop import Loop
from dtorch.controller.spawner import MAX_REPORT_BYTES, Report
from dtorch.core.errors import ProtocolError
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import AddWorker, Exited, Fork, Forked, Kill, Message, Stop, Stopped


class PoolSpawner:
    """A ``Spawner`` that asks the pool, over a connection like that to a template.

    Args:
        loop: where the connection is watched.
        report: called with what happened to workers.
        control: the connection; it ends when no worker is left after ``stop``.
    """

    def __init__(self, loop: Loop, report: Report, control: socket.socket) -> None:
        self.stopped = False
        self._loop, self._report, self._control = loop, report, control
        self._living: set[int] = set()
        loop.watch(control, self._on_ready)

    def start(self, index: int, request: AddWorker, connection: socket.socket, generation: int) -> None:
        """As ``Spawner.start``."""
        self._living.add(index)
        failure = self._tell(Fork(index, request.devices, request.threads, {}, generation), [connection])
        connection.close()
        if failure is not None:
            self._exited(Exited(index, failure))

    def kill(self, index: int) -> None:
        """As ``Spawner.kill``."""
        if index in self._living:
            self._tell(Kill(index))

    def check(self, now_s: float) -> None:
        """As ``Spawner.check``; the pool watches its machines itself."""

    def stop(self, grace_ms: int) -> None:
        """As ``Spawner.stop``."""
        if self._tell(Stop(grace_ms)) is not None:
            self.stopped = True

    def abandon(self) -> None:
        """As ``Spawner.abandon``: the pool ends what is left when this process has ended."""
        self.stopped = True

    def _tell(self, message: Message, connections: Sequence[socket.socket] = ()) -> str | None:
        try:
            socket.send_fds(self._control, [encode(message)], [c.fileno() for c in connections])
        except OSError as error:
            return f"the pool was not reached: {error}"
        return None

    def _on_ready(self, readable: bool, writable: bool) -> None:
        try:
            data = self._control.recv(MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.unwatch(self._control)
            self._control.close()
            self.stopped = True
            for index in sorted(self._living):
                self._exited(Exited(index, "the pool has ended"))
            return
        message = decode(data)
        if isinstance(message, Exited):
            self._exited(message)
        elif isinstance(message, Forked | Stopped):
            self._report(message)
        else:
            raise ProtocolError(f"a pool does not send {type(message).__name__}")

    def _exited(self, message: Exited) -> None:
        self._living.discard(message.index)
        self._report(message)
