"""Batches, acknowledgements and replies through a real controller and real workers."""

import os
import select
import time
from pathlib import Path

import pytest

from dtorch.core.errors import ProtocolError, SessionClosedError
from dtorch.protocol.codec import encode
from dtorch.protocol.messages import (
    Ack,
    AddWorker,
    Batch,
    Fault,
    Hello,
    ListWorkers,
    Ping,
    Pong,
    Reply,
    WorkerList,
    WorkerLost,
    WorkerUp,
)


def test_the_constructor_waits_for_nobody_and_early_messages_arrive(open_session):
    session = open_session("worker_side_torch:WithTorch")  # whose template takes a second to come up
    session.link.add_worker([4, 5], 1, {})
    session.batch(b"who")
    assert session.link.receive(0) is None
    up, _ = session.until(WorkerUp)
    assert (up.index, up.devices) == (0, (4, 5))
    assert session.until(Reply)[1] == [b"0 [4, 5] cpu True"]
    assert session.until(Ack)[0] == Ack(0)


def test_batches_arrive_in_order_at_all_or_at_some(open_session):
    session = open_session(workers=3)
    expected = {0: [], 1: [], 2: []}
    for number in range(300):
        targets = [None, (1,), (0, 2), (2, 1)][number % 4]
        text = str(number).encode()
        session.batch(b"note", text, targets=targets)
        for index in targets or expected:
            expected[index].append(text)
    for index, notes in expected.items():
        assert session.ask(b"recall", index=index) == notes


def test_the_slowest_worker_decides_what_is_acknowledged(open_session):
    session = open_session(workers=2)
    session.batch(b"sleep", b"0.3", targets=(0,))
    for _ in range(20):
        last = session.batch(b"nothing")
    acked = []
    while not acked or acked[-1] < last:
        acked.append(session.until(Ack)[0].seq)
    assert acked == sorted(set(acked))
    assert acked[0] == 0


def test_a_late_worker_gets_only_what_came_after_its_request(open_session):
    session = open_session(workers=1)
    session.batch(b"note", b"early")
    session.link.add_worker([1], 1, {})
    session.batch(b"note", b"late")
    session.until(WorkerUp)
    assert session.ask(b"recall", index=1) == [b"late"]
    assert session.ask(b"recall", index=0) == [b"early", b"late"]


def test_payloads_of_all_sizes(open_session):
    session = open_session(workers=1)
    frames = [b"", b"x", os.urandom(70_000), os.urandom(20_000_000), b"end"]
    assert session.ask(b"echo", *frames) == frames
    assert session.ask(b"echo", *[b"%d" % n for n in range(500)]) == [b"%d" % n for n in range(500)]


def test_a_client_that_does_not_read_blocks_nobody(open_session):
    session = open_session(workers=1)
    for _ in range(40):
        last = session.batch(b"echo", bytes(1_000_000))
    for _ in range(40):
        assert len(session.until(Reply)[1][0]) == 1_000_000
    while session.until(Ack)[0].seq < last:
        pass


def test_workers_get_their_environment_and_their_number_of_threads(open_session):
    session = open_session("worker_side_torch:WithTorch", env={"FOR_ALL": "yes"})
    session.link.add_worker([0], 3, {"ONLY_MINE": "first"})
    session.link.add_worker([1], 1, {"ONLY_MINE": "second"})
    session.up = {session.until(WorkerUp)[0].index: 0 for _ in range(2)}
    for index, (threads, mine) in enumerate([(b"3", b"first"), (b"1", b"second")]):
        assert session.ask(b"environment", b"FOR_ALL", index=index) == [b"yes"]
        assert session.ask(b"environment", b"ONLY_MINE", index=index) == [mine]
        assert session.ask(b"pool", index=index) == [threads + b" passive"]


def test_the_default_template_loads_torch_and_starts_no_thread(open_session):
    session = open_session("worker_side_torch:WithTorch", workers=1)
    assert "libtorch" in Path(f"/proc/{session.template}/maps").read_text()
    assert len(os.listdir(f"/proc/{session.template}/task")) == 1
    assert "libtorch" not in Path(f"/proc/{session.controller}/maps").read_text()



def test_questions(open_session):
    session = open_session(workers=2)
    session.link.send([encode(Ping(77))])
    assert session.until(Pong)[0].token == 77
    session.link.send([encode(ListWorkers())])
    rows = session.until(WorkerList)[0].workers
    assert [(row.index, row.pid, row.devices, row.state) for row in rows] == [
        (0, session.up[0], (0,), "up"),
        (1, session.up[1], (10,), "up"),
    ]


def test_receive_keeps_to_its_time_and_the_descriptor_wakes(open_session):
    session = open_session(workers=1)
    started = time.monotonic()
    assert session.link.receive(0) is None
    assert session.link.receive(0.05) is None
    assert time.monotonic() - started > 0.04
    poller = select.poll()
    poller.register(session.link.fileno(), select.POLLIN)
    assert not poller.poll(0)
    session.link.send([encode(Ping(1))])
    assert poller.poll(5000)
    assert session.next(0)[0] == Pong(1)


def test_an_executor_that_fails_is_a_fault_and_ends_the_worker(open_session):
    session = open_session(workers=2)
    session.batch(b"fail", targets=(1,))
    fault, _ = session.until(Fault)
    assert fault.index == 1
    assert "KeyError: 'no such tensor'" in fault.text
    assert "worker_side.py" in fault.text
    lost, _ = session.until(WorkerLost)
    assert lost == WorkerLost(1, session.up[1], (10,), "exit code 1")
    assert session.ask(b"echo", b"still here") == [b"still here"]


def test_an_executor_that_cannot_be_made(open_session):
    session = open_session("worker_side:Unmakeable")
    session.link.add_worker([0], 1, {})
    assert "OSError: the device is on fire" in session.until(Fault)[0].text
    assert session.until(WorkerLost)[0].reason == "exit code 1"


def test_an_executor_that_cannot_be_imported(open_session):
    session = open_session("worker_side:Nowhere")
    for index in range(2):
        session.link.add_worker([index], 1, {})
        lost, _ = session.until(WorkerLost)
        assert (lost.index, lost.pid) == (index, 0)
        assert "could not load worker_side:Nowhere: AttributeError" in lost.reason


def test_how_a_worker_ended_is_told_after_its_last_reply(open_session):
    session = open_session(workers=2)
    session.batch(b"leave", targets=(0,))
    assert session.until(WorkerLost)[0].reason == "exit code 3"
    session.batch(b"last_words", targets=(1,))
    assert session.next()[0] == Ack(0)
    assert session.next()[1] == [b"farewell"]
    assert session.until(WorkerLost)[0].reason == "signal SIGKILL"
    session.add()
    assert session.ask(b"who", index=2) == [b"2 [20] cpu True"]


def test_wrong_messages_are_answered_and_harm_nobody(open_session):
    session = open_session(workers=1)
    for frames in ([b"\xc1 nonsense"], [b""], [encode(Hello(1))], [encode(Batch(-1 + 1, (5,)))], [b"\x91" * 3000]):
        session.link.send(frames)
        assert session.until(Fault)[0].index is None
    with pytest.raises(ProtocolError):
        session.link.add_worker([-1], 1, {})
    assert session.ask(b"echo", b"fine") == [b"fine"]


def test_a_request_that_is_too_long_for_the_template_loses_the_worker(open_session):
    session = open_session(workers=1)
    session.link.send([encode(AddWorker((1,), 1, {f"V{i}": "x" * 60_000 for i in range(8)}))])
    assert "Message too long" in session.until(WorkerLost)[0].reason
    session.up[1] = 0
    session.add()


def test_garbage_on_the_wire_ends_the_session_with_a_reason(open_session):
    session = open_session(workers=1)
    session.link._channel._socket.sendall(b"\xff" * 64)
    assert "no message" in session.until(Fault)[0].text


def test_another_version_is_refused(open_session, monkeypatch):
    monkeypatch.setattr("dtorch.launch.local.PROTOCOL_VERSION", 999)
    with pytest.raises(ProtocolError, match="speaks protocol version 999"):
        open_session().link.receive(10)


def test_many_null_workers_in_one_process(open_session):
    session = open_session(null_workers=100)
    ups = [session.until(WorkerUp)[0] for _ in range(100)]
    assert sorted(up.index for up in ups) == list(range(100))
    assert len({up.pid for up in ups}) == 1
    session.batch(b"work")
    session.batch(b"echo", b"a", b"b")
    session.batch(b"echo", b"c", targets=(42,))
    answers = [session.until(Reply) for _ in range(101)]
    assert {message.index for message, payload in answers if payload == [b"a", b"b"]} == set(range(100))
    assert [message.index for message, payload in answers if payload == [b"c"]] == [42]
    session.link.add_worker([0], 1, {})
    assert "takes no others" in session.until(WorkerLost)[0].reason


def test_a_closed_link_says_so(open_session):
    session = open_session()
    session.link.close()
    session.link.close()
    for use in (lambda: session.link.send([b"x"]), lambda: session.link.receive(0)):
        with pytest.raises(SessionClosedError, match="has been shut down"):
            use()
