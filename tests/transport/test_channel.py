"""Messages over a socket pair."""

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.comm.channel import MAX_FRAMES, Channel, ChannelClosedError, pack
from dtorch.core.errors import CommError, ProtocolError


@pytest.fixture
def ends():
    left, right = (Channel(s) for s in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def test_frames_arrive_as_they_were_sent(ends):
    left, right = ends
    messages = [[b""], [b"a", b"", b"c"], [bytearray(b"x" * 70_000), b"end"], [memoryview(b"abcdefgh").cast("I")]]
    for message in messages:
        left.send(message)
    for message in messages:
        assert [bytes(f) for f in right.receive(5)] == [bytes(f) for f in message]
    assert right.receive(0) is None


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) + 1, 5_000_000])
def test_a_long_message_and_what_follows_it(ends, size):
    left, right = ends
    body = bytes(range(256)) * (size // 256 + 1)
    sender = threading.Thread(target=lambda: [left.send([b"head", body[:size], b"tail"]), left.send([b"next"])])
    sender.start()
    assert [bytes(f) for f in right.receive(10)] == [b"head", body[:size], b"tail"]
    assert right.receive(10) == [b"next"]
    sender.join()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=50), min_size=1, max_size=4), max_size=6), st.data())
def test_any_cut_of_the_stream_gives_the_same_messages(messages, data):
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    stream = b"".join(bytes(piece) for message in messages for piece in pack(message))
    got = []
    while stream:
        step = data.draw(st.integers(1, len(stream)))
        sender.sendall(stream[:step])
        stream = stream[step:]
        channel.read()
        while (message := channel.take()) is not None:
            got.append(message)
    assert got == messages
    sender.close()
    channel.close()


def test_a_post_that_does_not_fit_is_finished_by_flush(ends):
    left, right = ends
    body = b"z" * 30_000_000
    assert not left.post(pack([body]))
    message = None
    while message is None:
        left.flush()
        message = right.receive(0)
    assert message == [body]
    assert left.flush()


def test_send_gives_up_on_a_peer_that_does_not_read_and_finishes_later(ends):
    left, right = ends
    body = bytearray(b"z" * 30_000_000)
    with pytest.raises(CommError, match=r"not read for 0\.05 s"):
        left.send([body], timeout_s=0.05)
    body[:] = bytes(len(body))  # the caller's own again
    sender = threading.Thread(target=lambda: left.send([b"second"]))
    sender.start()
    (first,) = right.receive(10)
    assert first == b"z" * 30_000_000
    assert right.receive(10) == [b"second"]
    sender.join()


def test_the_end_of_the_peer_comes_after_its_messages(ends):
    left, right = ends
    left.send([b"last"])
    left.close()
    assert right.receive(1) == [b"last"]
    with pytest.raises(ChannelClosedError):
        right.receive(None)
    with pytest.raises(ChannelClosedError):
        right.send([b"x"])


@pytest.mark.parametrize("count", [0, MAX_FRAMES + 1])
def test_a_message_needs_a_sensible_number_of_frames(ends, count):
    with pytest.raises(ProtocolError, match=f"not {count}"):
        ends[0].send([b""] * count)


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, bytes(4), struct.pack("<IQ", 1, 1 << 60), struct.pack("<IQQ", 2, 2**64 - 1, 2**64 - 1)]
)
def test_garbage_is_refused(garbage):
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    sender.sendall(garbage)
    with pytest.raises(ProtocolError, match="was announced"):
        channel.receive(1)
    with pytest.raises(ProtocolError, match="was announced"):
        channel.receive(1)
    sender.close()
    channel.close()


def test_interrupts_at_any_moment_lose_no_byte():
    program = Path(__file__).with_name("interrupt_storm.py")
    environment = {**os.environ, "PYTHONPATH": str(program.parents[2])}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, check=False, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
