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
from collections.abc import Callable, Sequence
from functools import cache

from dtorch.core.errors import CommError, ProtocolError

Buffer = bytes | bytearray | memoryview
Frame = bytes | bytearray  # a frame received in one piece is bytes, a long one a bytearray that belongs to the receiver

MAX_FRAMES = 4096
MAX_MESSAGE_BYTES = 1 << 38
_CHUNK_BYTES = 1 << 16  # one read; messages up to this size are copied into one piece before they are sent
_SOCKET_BUFFER_BYTES = 1 << 20
_COUNT = struct.Struct("<I")
_RECEIVE_FLAGS = socket.MSG_DONTWAIT
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL

# Ctrl-C may raise KeyboardInterrupt between any two steps of Python, and most likely right after a system call. A
# notebook goes on after it, so it must not lose bytes or what is known of them: results of system calls go into a list
# within one C call, `results.extend(map(call, ...))`, and every change of state is one assignment or one C call.


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

    An interrupt (``KeyboardInterrupt``) harms neither direction: a message that was being sent is finished by the next
    call, one that was being received stays.

    Args:
        connection: the socket.
        most_bytes: of a message that is received.
    """

    def __init__(self, connection: socket.socket, most_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._most_bytes = most_bytes
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        self._socket = connection
        self._outgoing: deque[tuple[Buffer, list[int]]] = deque()  # pieces, with the counts of bytes sent of each
        # What has been received: a buffer, where in it the next message starts, chunks that follow it, and the long
        # message that is being received instead, if any.
        self._incoming: tuple[bytes, int, list[bytes], _LongMessage | None] = (b"", 0, [], None)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        """The socket's descriptor; -1 after ``close``."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this process's end. Idempotent."""
        self._socket.close()

    # Sending

    def send(
        self, frames: Sequence[Buffer], timeout_s: float | None = None, idle: Callable[[], None] | None = None
    ) -> None:
        """Send one message and wait until the kernel has all of it.

        Args:
            frames: the message; they may be changed when this returns or raises.
            timeout_s: how long at most; ``None``: for ever.
            idle: called every second while the peer does not read.

        Raises:
            ChannelClosedError: the peer has ended.
            CommError: the peer did not read within ``timeout_s``; the rest of the message goes out with the next call.
        """
        if self.post(pack(frames)):
            return
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self.flush():
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise CommError(f"the peer has not read for {timeout_s} s")
                slice_s = remaining if idle is None else min(1.0, 1.0 if remaining is None else remaining)
                if not self._writable.poll(None if slice_s is None else slice_s * 1000) and idle is not None:
                    idle()
        except BaseException:
            # The caller may change its buffers from now on.
            self._outgoing = deque([(bytes(_after(piece, counts)), []) for piece, counts in self._outgoing])
            raise

    def post(self, pieces: Sequence[Buffer]) -> bool:
        """Queue a packed message, which nobody may change, and send what goes without waiting.

        Returns:
            Whether all went out; if not, call ``flush`` when the socket is writable.
        """
        self._outgoing.extend([(piece, []) for piece in pieces])
        return self.flush()

    def flush(self) -> bool:
        """Send what goes without waiting; returns whether all went out.

        Raises:
            ChannelClosedError: the peer has ended.
        """
        outgoing = self._outgoing
        while outgoing:
            piece, counts = outgoing[0]
            rest = _after(piece, counts)
            if not rest:
                outgoing.popleft()
                continue
            try:
                counts.extend(map(self._socket.send, (rest,), (_SEND_FLAGS,)))
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelClosedError(f"the peer is gone: {error}") from error
        return True

    # Receiving

    def receive(self, timeout_s: float | None = None) -> list[Frame] | None:
        """The next message, or ``None`` when none is complete within ``timeout_s`` (``None``: wait).

        Raises:
            ChannelClosedError: the peer has ended and everything it sent has been received.
            ProtocolError: the peer sent something that is no message.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            frames = self.take()
            if frames is not None:
                return frames
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._readable.poll(None if remaining is None else remaining * 1000):
                return None
            self.read()

    def read(self) -> bool:
        """Read once, without waiting; ``take`` then gives the messages. Returns whether anything came.

        Raises:
            ChannelClosedError: as ``receive``.
        """
        _, _, chunks, long = self._incoming
        try:
            if long is None:
                chunks.extend(map(self._socket.recv, (_CHUNK_BYTES,), (_RECEIVE_FLAGS,)))
                ended = not chunks[-1]
            else:
                ended = not long.read(self._socket)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosedError(f"the peer is gone: {error}") from error
        if ended:
            raise ChannelClosedError("the peer has closed the connection")
        return True

    def take(self) -> list[Frame] | None:
        """The next message among what has been read, or ``None``.

        Raises:
            ProtocolError: as ``receive``.
        """
        buffer, start, chunks, long = self._incoming
        while long is None:
            frames, end = _parse(buffer, start, self._most_bytes)
            if frames is not None:
                self._incoming = buffer, end, chunks, None
                return frames
            if not chunks:
                if end > start + _CHUNK_BYTES:
                    self._incoming = b"", 0, [], _LongMessage(buffer, start)
                return None
            buffer, start, chunks = buffer[start:] + b"".join(chunks), 0, []
            self._incoming = buffer, start, chunks, None
        if not long.is_complete():
            return None
        frames = long.frames
        self._incoming = b"", 0, [], None
        return frames


def _after(piece: Buffer, counts: list[int]) -> Buffer:
    """What is left of a piece after these counts of bytes."""
    if not counts:
        return piece
    if len(counts) > 1:
        counts[:] = [sum(counts)]
    return memoryview(piece)[counts[0] :]


def _lengths(buffer: bytes, start: int) -> tuple[Sequence[int], int]:
    """The lengths of the frames of the message at ``start``, if they are there, and where the frames start."""
    if len(buffer) - start < _COUNT.size:
        return (), start + _COUNT.size
    (count,) = _COUNT.unpack_from(buffer, start)
    if not 1 <= count <= MAX_FRAMES:
        raise ProtocolError(f"a message of {count} frames was announced, the limit is {MAX_FRAMES}")
    lengths = _lengths_struct(count)
    body = start + _COUNT.size + lengths.size
    if body > len(buffer):
        return (), body
    return lengths.unpack_from(buffer, start + _COUNT.size), body


def _parse(buffer: bytes, start: int, most_bytes: int) -> tuple[list[Frame] | None, int]:
    """The message at ``start``, or ``None`` if not all of it is in the buffer, and where it ends as far as is known.

    Raises:
        ProtocolError: there is no message.
    """
    lengths, position = _lengths(buffer, start)
    end = position + sum(lengths)
    if end - start > most_bytes:
        raise ProtocolError(f"a message of {end - start} bytes was announced, the limit is {most_bytes}")
    if not lengths or end > len(buffer):
        return None, end
    frames: list[Frame] = []
    for length in lengths:
        frames.append(buffer[position : position + length])
        position += length
    return frames, end


class _LongMessage:
    """A message that is received straight into the memory of its frames.

    Args:
        buffer: holds its lengths, and what has been received of it, from ``start`` to the end.
    """

    def __init__(self, buffer: bytes, start: int) -> None:
        lengths, position = _lengths(buffer, start)
        self.frames: list[Frame] = [bytearray(length) for length in lengths]
        self._gaps: deque[tuple[memoryview, list[int]]] = deque()  # frames, with the counts of bytes received of each
        for frame in self.frames:
            part = buffer[position : position + len(frame)]
            memoryview(frame)[: len(part)] = part
            position += len(part)
            self._gaps.append((memoryview(frame), [len(part)]))

    def is_complete(self) -> bool:
        """Whether all of it has been received."""
        gaps = self._gaps
        while gaps and not _after(*gaps[0]):
            gaps.popleft()
        return not gaps

    def read(self, connection: socket.socket) -> bool:
        """Receive once, without waiting; returns whether anything came, which means that the connection goes on."""
        if self.is_complete():
            return True
        frame, counts = self._gaps[0]
        counts.extend(map(connection.recv_into, (_after(frame, counts),), (0,), (_RECEIVE_FLAGS,)))
        return counts[-1] > 0
