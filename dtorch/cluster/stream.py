"""A socket pair's bytes carried to another machine and back, in order, once, and never more than a window ahead.

Both ends count bytes. What was sent is kept until the other end has handed it on, so a connection that breaks can be
replaced: ``resume`` sends again what did not arrive. The window bounds what either end keeps.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dtorch.core.errors import ProtocolError
from dtorch.protocol.pool import MAX_DATA, Consumed, Ended, PoolMessage, pack, pack_data

WINDOW = 8 << 20
_TELL = WINDOW // 8


class Stream:
    """One end: a local socket, and the way to the other end.

    Args:
        number: by which both ends know it.
        local: whose bytes are carried; closed by ``close``.
        send: sends a frame towards the other end.

    Attributes:
        received: bytes that came from the other end.
        over: both directions have ended, or the local side has gone away altogether.
        remote_end: the other end has ended; why, if not in order.
    """

    def __init__(self, number: int, local: socket.socket, send: Callable[[bytes], None]) -> None:
        local.setblocking(False)
        self.number, self.local, self._send = number, local, send
        self._sent = self._consumed = 0
        self._kept: deque[bytes] = deque()  # what was sent from `_consumed` on
        self.received = self._written = self._told = 0
        self._waiting: deque[memoryview] = deque()
        self.local_ended = False
        self.remote_end: str | None = None
        self.closed = False

    @property
    def wants(self) -> tuple[bool, bool]:
        """Whether to call when the socket is readable, and when it is writable."""
        return not self.local_ended and self._sent - self._consumed < WINDOW, bool(self._waiting)

    @property
    def is_flushed(self) -> bool:
        """Whether all that came has been handed on."""
        return not self._waiting

    def readable(self) -> None:
        """Send what the socket has, as far as the window allows."""
        while (room := WINDOW - (self._sent - self._consumed)) > 0 and not self.local_ended:
            try:
                data = self.local.recv(min(MAX_DATA, room))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.local_ended = True
                self.tell(Ended(self.number, self._sent, ""))
                return
            position, self._sent = self._sent, self._sent + len(data)
            self._kept.append(data)
            self._send(pack_data(self.number, position, data))

    def data(self, position: int, data: memoryview) -> None:
        """Bytes from the other end.

        Raises:
            ProtocolError: they are not the next ones, or more than the window.
        """
        known = self.received - position
        if known < 0 or self.received + len(data) - known - self._written > WINDOW or self.remote_end is not None:
            raise ProtocolError(f"stream {self.number}: bytes at {position}, expected were those at {self.received}")
        if known >= len(data):
            return  # sent again after a break
        self.received += len(data) - known
        self._waiting.append(data[known:])
        self.flush()

    def flush(self) -> None:
        """Hand on what waits, as far as the socket takes it."""
        while self._waiting:
            piece = self._waiting[0]
            try:
                count = self.local.send(piece, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:  # nobody reads any more: it is read to its end and told
                self._written = self.received
                self._waiting.clear()
                break
            self._written += count
            if count == len(piece):
                self._waiting.popleft()
            else:
                self._waiting[0] = piece[count:]
        if self._written - self._told >= _TELL:
            self._told = self._written
            self.tell(Consumed(self.number, self._written))
        if self.remote_end is not None and not self._waiting:
            with suppress(OSError):
                self.local.shutdown(socket.SHUT_WR)

    def consumed(self, position: int) -> None:
        """The other end has handed on so many bytes.

        Raises:
            ProtocolError: so many were not sent.
        """
        if position > self._sent:
            raise ProtocolError(f"stream {self.number}: {position} bytes are said to have come of {self._sent}")
        while self._kept and self._consumed + len(self._kept[0]) <= position:
            self._consumed += len(self._kept.popleft())

    def ended(self, text: str) -> None:
        """The other end has ended."""
        self.remote_end = text
        self.flush()

    def resume(self, position: int) -> None:
        """After a break: the other end has received so many bytes; send those after them again.

        Raises:
            ProtocolError: that cannot be.
        """
        if not self._consumed <= position <= self._sent:
            raise ProtocolError(
                f"stream {self.number} cannot go on at {position}: {self._consumed} to {self._sent} are here"
            )
        at = self._consumed
        for piece in self._kept:
            if at + len(piece) > position:
                self._send(pack_data(self.number, at, piece))
            at += len(piece)
        self.tell(Consumed(self.number, self._written))
        if self.local_ended:
            self.tell(Ended(self.number, self._sent, ""))

    def tell(self, message: PoolMessage) -> None:
        """Send the other end a message."""
        self._send(pack(message))

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        self.closed = True
        self.local.close()
