"""Messages over a connected stream socket.

On the wire a message is a little-endian ``u32`` count of frames, one ``u64`` length a frame, and the frames. Between
processes of one machine this costs about a third of a ZeroMQ socket pair per hop, for want of I/O threads to wake, and
the end of the peer, also by SIGKILL, is seen at once and after everything it had sent.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from functools import cache

from dtorch.core.errors import CommError, ProtocolError

Buffer = bytes | bytearray | memoryview
Frame = bytes | bytearray  # a frame received in one piece is bytes, a long one a bytearray that belongs to the receiver

MAX_FRAMES = 4096
MAX_MESSAGE_BYTES = 1 << 38
_CHUNK_BYTES = 1 << 16  # one read; messages up to this size are copied into one piece before they are sent
_SOCKET_BUFFER_BYTES = 1 << 20
_COUNT = struct.Struct("<I")


class ChannelClosedError(CommError):
    """The peer has closed the channel or has ended."""


@cache
def _lengths_struct(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


def pack(frames: Sequence[Buffer]) -> list[Buffer]:
    """The bytes of one message on the wire: one piece when it is small, otherwise pieces that share the frames' memory.

    Raises:
        ProtocolError: there are no frames, or too many.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message has 1 to {MAX_FRAMES} frames, not {len(frames)}")
    flat = [_flat(frame) if isinstance(frame, memoryview) else frame for frame in frames]
    lengths = [len(f) for f in flat]
    head = _COUNT.pack(len(flat)) + _lengths_struct(len(flat)).pack(*lengths)
    if sum(lengths) <= _CHUNK_BYTES:
        return [b"".join((head, *flat))]
    return [head, *(f for f in flat if len(f))]


def _flat(view: memoryview) -> Buffer:
    return view.cast("B") if view.nbytes else b""  # a view with a zero in its shape cannot be cast


class Channel:
    """One end of a connection. Owns the socket; used by one thread at a time.

    A ``KeyboardInterrupt`` while ``send`` or ``receive`` waits is harmless: the message that was being sent is finished
    by the next call. One that hits the few microseconds in which bytes change hands could tear the stream, so that is
    noted and the channel refuses further use.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket = connection
        self._outgoing: deque[Buffer] = deque()
        self._inbox: deque[list[Frame]] = deque()
        self._rest = b""  # the start of a message whose end has not arrived
        self._long: _LongMessage | None = None
        self._transferring = False
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor; -1 after ``close``."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this process's end. Idempotent."""
        self._socket.close()

    # Sending

    def send(self, frames: Sequence[Buffer], timeout_s: float | None = None) -> None:
        """Send one message and wait until the kernel has all of it.

        Raises:
            ChannelClosedError: the peer has ended.
            CommError: the peer did not read within ``timeout_s``; the rest of the message goes out with the next call.
        """
        self._outgoing.extend(pack(frames))
        if self.flush():
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._poller.modify(self._socket, select.POLLOUT)
        try:
            while not self.flush():
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise CommError(f"the peer has not read for {timeout_s} s")
                self._poller.poll(None if remaining is None else remaining * 1000)
        except BaseException:
            # The caller may change its buffers from now on.
            self._outgoing = deque(bytes(piece) for piece in self._outgoing)
            raise
        finally:
            self._poller.modify(self._socket, select.POLLIN)

    def post(self, pieces: Sequence[Buffer]) -> bool:
        """Queue a packed message, which nobody may change, and send what goes without waiting.

        Returns:
            Whether all went out; if not, call ``flush`` when the socket is writable.
        """
        self._outgoing.extend(pieces)
        return self.flush()

    def flush(self) -> bool:
        """Send what goes without waiting; returns whether all went out.

        Raises:
            ChannelClosedError: the peer has ended.
        """
        outgoing = self._outgoing
        while outgoing:
            self._enter()
            piece = outgoing[0]
            try:
                sent = self._socket.send(piece, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._transferring = False
                return False
            except OSError as error:
                self._transferring = False
                raise ChannelClosedError(f"the peer is gone: {error}") from error
            if sent == len(piece):
                outgoing.popleft()
            else:
                outgoing[0] = memoryview(piece)[sent:]
            self._transferring = False
        return True

    # Receiving

    def receive(self, timeout_s: float | None = None) -> list[Frame] | None:
        """The next message, or ``None`` when none is complete within ``timeout_s`` (``None``: wait).

        Raises:
            ChannelClosedError: the peer has ended and everything it sent has been received.
            ProtocolError: the peer sent something that is no message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._inbox:
            self._check_whole()
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._poller.poll(None if remaining is None else remaining * 1000):
                return None
            self.read()
        return self._inbox.popleft()

    def take(self) -> list[Frame] | None:
        """The next message among those already read, or ``None``."""
        return self._inbox.popleft() if self._inbox else None

    def read(self) -> bool:
        """Read once, without waiting, and keep complete messages for ``take``; returns whether anything came.

        Raises:
            ChannelClosedError, ProtocolError: as ``receive``.
        """
        self._enter()
        try:
            if self._long is not None:
                count = self._socket.recv_into(self._long.gap(), 0, socket.MSG_DONTWAIT)
            else:
                data = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
                count = len(data)
        except BlockingIOError:
            self._transferring = False
            return False
        except OSError as error:
            self._transferring = False
            raise ChannelClosedError(f"the peer is gone: {error}") from error
        if count == 0:
            self._transferring = False
            raise ChannelClosedError("the peer has closed the connection")
        if self._long is None:
            self._parse(self._rest + data if self._rest else data)
        elif self._long.advance(count):
            self._inbox.append(self._long.frames)
            self._long = None
        self._transferring = False
        return True

    def _enter(self) -> None:
        self._check_whole()
        self._transferring = True

    def _check_whole(self) -> None:
        if self._transferring:
            raise CommError(
                "an interrupt, a second thread or a malformed message hit this connection in the middle of a message; "
                "it cannot be used any more, start a new session"
            )

    def _parse(self, data: bytes) -> None:
        """Move the complete messages at the start of ``data`` to the inbox and keep the rest."""
        start, size = 0, len(data)
        while size - start >= _COUNT.size:
            (count,) = _COUNT.unpack_from(data, start)
            if not 1 <= count <= MAX_FRAMES:
                raise ProtocolError(f"a message of {count} frames was announced, the limit is {MAX_FRAMES}")
            lengths_struct = _lengths_struct(count)
            body = start + _COUNT.size + lengths_struct.size
            if body > size:
                break
            lengths = lengths_struct.unpack_from(data, start + _COUNT.size)
            end = body + sum(lengths)
            if end > size:
                if end - body > MAX_MESSAGE_BYTES:
                    raise ProtocolError(
                        f"a message of {end - body} bytes was announced, the limit is {MAX_MESSAGE_BYTES}"
                    )
                if end - body > _CHUNK_BYTES:
                    self._long = _LongMessage(lengths, memoryview(data)[body:])
                    start = size
                break
            frames: list[Frame] = []
            for length in lengths:
                frames.append(data[body : body + length])
                body += length
            self._inbox.append(frames)
            start = end
        self._rest = data[start:]


class _LongMessage:
    """A message that is read straight into the memory of its frames."""

    def __init__(self, lengths: Sequence[int], beginning: memoryview) -> None:
        self.frames: list[Frame] = [bytearray(length) for length in lengths]
        self._gaps = deque(memoryview(frame) for frame in self.frames if len(frame))
        while beginning:
            gap = self._gaps[0]
            part = beginning[: len(gap)]
            gap[: len(part)] = part
            beginning = beginning[len(part) :]
            self.advance(len(part))

    def gap(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._gaps[0]

    def advance(self, count: int) -> bool:
        """``count`` bytes of the gap have been filled; returns whether the message is complete."""
        rest = self._gaps.popleft()[count:]
        if rest:
            self._gaps.appendleft(rest)
        return not self._gaps
