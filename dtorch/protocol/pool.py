"""What the processes of a pool tell each other: one frame a message, of three kinds.

    1, stream, position, bytes   of a stream's bytes, from that position on
    2, session, header           what a template is told or tells, on its way (``protocol.messages``)
    3, header                    a message of this module

Decoding either gives a valid message or raises ``ProtocolError``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

from dtorch.core.errors import ProtocolError
from dtorch.protocol.codec import Codec, decode, encode
from dtorch.protocol.messages import Message

POOL_VERSION = 1

_DATA = struct.Struct("<BQQ")
_TEMPLATE = struct.Struct("<BQ")
MAX_DATA = 1 << 18
"""Most bytes of a stream in one frame."""
MAX_FRAME = 1 << 21
"""Most bytes of a frame."""


@dataclass(frozen=True, slots=True)
class Open:
    """Client to gate, first of all: begin a session. Reply: ``Opened`` or ``Refused``."""

    KIND: ClassVar[int] = 40
    version: int
    token: str
    name: str
    device_type: str
    restarts: int
    log_operators: int
    log_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """Gate to client: its session's number, the stream to its controller, and how many workers it may have."""

    KIND: ClassVar[int] = 41
    session: int
    stream: int
    workers: int
    secret: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Gate to client or agent: it is not let in, or no longer; nothing follows."""

    KIND: ClassVar[int] = 42
    text: str


@dataclass(frozen=True, slots=True)
class Again:
    """Client to gate over a new connection: go on with a session of which it has received its stream up to here.

    Reply: ``Again`` with what the gate has received, or ``Refused``.
    """

    KIND: ClassVar[int] = 43
    session: int
    secret: str
    received: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life; with ``answer`` 1 another is wanted."""

    KIND: ClassVar[int] = 44
    answer: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """So many bytes of a stream have been handed on; as many more than the window may be sent."""

    KIND: ClassVar[int] = 45
    stream: int
    position: int


@dataclass(frozen=True, slots=True)
class Ended:
    """This side of a stream has ended, after ``position`` bytes; ``text`` says why when that was not in order."""

    KIND: ClassVar[int] = 46
    stream: int
    position: int
    text: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Gate to client: whose message was that? ``Again`` is wanted."""

    KIND: ClassVar[int] = 47


@dataclass(frozen=True, slots=True)
class Join:
    """Agent to gate, first of all: a machine with these places for workers. Reply: ``Joined`` or ``Refused``."""

    KIND: ClassVar[int] = 50
    version: int
    host: str
    pid: int
    address: str
    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Gate to agent: it is part of the pool, whose sessions have directories that begin with ``name``."""

    KIND: ClassVar[int] = 51
    name: str


@dataclass(frozen=True, slots=True)
class Host:
    """Gate to agent: fork a worker of a session, with a stream to its controller. Its template tells what comes of it."""

    KIND: ClassVar[int] = 52
    session: int
    stream: int
    index: int
    devices: tuple[int, ...]
    threads: int
    generation: int
    slot: int
    meeting: str


@dataclass(frozen=True, slots=True)
class Leave:
    """Gate to agent: end what is left of a session. Agent to gate: nothing is left of its workers."""

    KIND: ClassVar[int] = 53
    session: int


@dataclass(frozen=True, slots=True)
class Meet:
    """Gate to agent: let the workers of a session meet at this machine. Reply: ``Meeting``."""

    KIND: ClassVar[int] = 54
    session: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """Agent to gate: where the workers of a session meet, ``host:port``."""

    KIND: ClassVar[int] = 55
    session: int
    address: str


@dataclass(frozen=True, slots=True)
class Look:
    """Client to gate: what is in the pool? Reply: ``Pool`` or ``Refused``."""

    KIND: ClassVar[int] = 56
    version: int
    token: str


@dataclass(frozen=True, slots=True)
class Pool:
    """Gate to client: one text a place for a worker, and one a session."""

    KIND: ClassVar[int] = 57
    slots: tuple[str, ...]
    sessions: tuple[str, ...]


PoolMessage = (
    Open | Opened | Refused | Again | Beat | Consumed | Ended | Unknown | Join | Joined | Host | Leave | Meet | Meeting
    | Look | Pool
)  # fmt: skip

_codec = Codec(PoolMessage)


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a stream."""

    stream: int
    position: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class ForTemplate:
    """A message of, or for, the template of a session."""

    session: int
    message: Message


def pack_data(stream: int, position: int, data: bytes | memoryview) -> bytes:
    """The frame of ``Data``."""
    return b"".join((_DATA.pack(1, stream, position), data))


def pack(message: PoolMessage | ForTemplate) -> bytes:
    """The frame of a message.

    Raises:
        ProtocolError: a field is out of bounds.
    """
    if isinstance(message, ForTemplate):
        return _TEMPLATE.pack(2, message.session) + encode(message.message)
    return b"\x03" + _codec.encode(message)


def unpack(frame: bytes) -> PoolMessage | Data | ForTemplate:
    """The message of a frame.

    Raises:
        ProtocolError: this is none.
    """
    kind = frame[0] if frame else 0
    if kind == 1 and _DATA.size < len(frame) <= _DATA.size + MAX_DATA:
        _, stream, position = _DATA.unpack_from(frame)
        return Data(stream, position, memoryview(frame)[_DATA.size :])
    if kind == 2 and len(frame) > _TEMPLATE.size:
        return ForTemplate(_TEMPLATE.unpack_from(frame)[1], decode(frame[_TEMPLATE.size :]))
    if kind == 3:
        message: PoolMessage = _codec.decode(frame[1:])
        return message
    raise ProtocolError(f"a frame of {len(frame)} bytes is no message of a pool")
