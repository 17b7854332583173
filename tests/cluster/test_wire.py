"""What arrives from the network: anything is either a valid message or refused, and streams deliver every byte once."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.cluster.stream import WINDOW, Stream
from dtorch.core.errors import ProtocolError
from dtorch.protocol import pool as P
from dtorch.protocol.messages import Exited, Fork

SAMPLES = [
    P.Open(1, "t", "me", "cpu", 3, 4, 5), P.Opened(1, 2, 3, "s"), P.Refused("no"), P.Again(1, "s", 7), P.Beat(1),
    P.Consumed(1, 2), P.Ended(1, 2, ""), P.Unknown(), P.Join(1, "h", 5, "127.0.0.1", ("cpu:0",)), P.Joined("n"),
    P.Host(1, 2, 3, (0, 1), 1, 0, 1, "h:1"), P.Leave(1), P.Meet(1), P.Meeting(1, "h:1"), P.Look(1, "t"),
    P.Pool(("a",), ()), P.ForTemplate(4, Exited(1, "x")), P.ForTemplate(4, Fork(1, (0,), 1, {}, 0)),
]  # fmt: skip


def test_every_message_survives():
    kinds = {type(s) for s in SAMPLES} - {P.ForTemplate}
    assert kinds == set(P.PoolMessage.__args__)
    for sample in SAMPLES:
        assert P.unpack(P.pack(sample)) == sample
    found = P.unpack(P.pack_data(3, 9, b"abc"))
    assert (found.stream, found.position, bytes(found.data)) == (3, 9, b"abc")


@st.composite
def damaged(draw):
    frame = bytearray(P.pack(draw(st.sampled_from(SAMPLES))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame) - 1))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
        if not frame:
            break
    return bytes(frame)


@settings(max_examples=400, deadline=None, database=None)
@given(st.one_of(st.binary(max_size=200), damaged()))
def test_any_frame_is_a_message_or_refused(frame):
    try:
        message = P.unpack(frame)
    except ProtocolError:
        return
    if isinstance(message, P.Data):
        assert 0 < len(message.data) <= P.MAX_DATA
    else:
        assert P.unpack(P.pack(message)) == message


class Wire:
    """Two streams and what is under way between them, which may be lost."""

    def __init__(self):
        (self.near, a), (self.far, b) = socket.socketpair(), socket.socketpair()
        self.frames = {0: [], 1: []}
        self.ends = [Stream(1, a, self.frames[0].append), Stream(1, b, self.frames[1].append)]

    def carry(self, source):
        """Hand over what this end has sent."""
        frames, self.frames[source][:] = list(self.frames[source]), []
        to = self.ends[1 - source]
        for message in map(P.unpack, frames):
            if isinstance(message, P.Data):
                to.data(message.position, message.data)
            elif isinstance(message, P.Consumed):
                to.consumed(message.position)
            else:
                to.ended(message.text)

    def break_and_resume(self):
        for frames in self.frames.values():
            frames.clear()
        a, b = self.ends
        a.resume(b.received)
        b.resume(a.received)

    def close(self):
        for end in (self.near, self.far, *self.ends):
            end.close()


@pytest.mark.parametrize("seed", range(4))
def test_bytes_arrive_once_and_in_order_through_breaks(seed):
    wire, chance = Wire(), random.Random(seed)
    data = chance.randbytes(3 * WINDOW + 12345)
    sent, got = 0, bytearray()
    wire.near.setblocking(False)
    wire.far.setblocking(False)
    while len(got) < len(data):
        if sent < len(data):
            with contextlib.suppress(BlockingIOError):
                sent += wire.near.send(data[sent : sent + chance.randrange(1, 1 << 20)])
        wire.ends[0].readable()
        assert wire.ends[0]._sent - wire.ends[1]._written <= WINDOW
        if chance.random() < 0.1:
            wire.break_and_resume()
        wire.carry(0)
        wire.ends[1].flush()
        with contextlib.suppress(BlockingIOError):
            got += wire.far.recv(1 << 20)
        wire.carry(1)
    assert bytes(got) == data
    wire.near.close()
    wire.ends[0].readable()
    wire.carry(0)
    assert wire.far.recv(1) == b""
    wire.close()


def test_a_peer_cannot_send_what_nobody_asked_for():
    wire = Wire()
    stream = wire.ends[0]
    with pytest.raises(ProtocolError, match="expected were those at 0"):
        stream.data(5, memoryview(b"x"))
    with pytest.raises(ProtocolError, match="are said to have come"):
        stream.consumed(1)
    with pytest.raises(ProtocolError, match="cannot go on"):
        stream.resume(7)
    piece = memoryview(bytes(P.MAX_DATA))
    with pytest.raises(ProtocolError):  # nobody reads: the socket's buffer fills, then the window
        for k in range(2 * WINDOW // P.MAX_DATA):
            stream.data(k * P.MAX_DATA, piece)
    assert sum(len(x) for x in stream._waiting) <= WINDOW
    wire.close()
