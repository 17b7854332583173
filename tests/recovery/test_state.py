"""What the controller decides about losses and snapshots, without any process, clock or socket."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dtorch.controller.log import Log
from dtorch.controller.state import (
    ControllerState,
    DropSnapshot,
    KillWorker,
    PassToClient,
    PassToWorkers,
    StartWorker,
    ToClient,
    ToWorker,
)
from dtorch.controller.stream import Reader
from dtorch.protocol import commands as C
from dtorch.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AddWorker,
    Batch,
    Broken,
    Fault,
    Hello,
    Replay,
    Reply,
    Restarting,
    Resume,
    Resumed,
    Save,
    Saved,
    WorkerHello,
    WorkerLost,
    WorkerUp,
)

VALUE = [b"header", msgpack.packb([C.VALUE, 1, 0, [], None])]
ERROR = [b"header", msgpack.packb([C.ERROR, 3, "aten.mm", "cpu:0", "RuntimeError", "", "", [], None])]


def hello(pid: int) -> WorkerHello:
    return WorkerHello(PROTOCOL_VERSION, pid, "host")


def request(index: int) -> AddWorker:
    return AddWorker((index,), 1, {})


def up(workers: int = 2, restarts: int = 2, operators: int = 1 << 60, nbytes: int = 1 << 60) -> ControllerState:
    log = Log(operators, nbytes, "/snapshots", lambda path, offset, count: b"")
    state = ControllerState(1, "here", log, restarts)
    state.client_sent(Hello(PROTOCOL_VERSION), ())
    for index in range(workers):
        state.client_sent(request(index), ())
        state.worker_sent(index, hello(100 + index), ())
    return state


def frames(seq: int) -> list[Any]:
    return [b"batch %d" % seq, msgpack.packb([C.PUT, seq + 1, 0, 1]), b"bytes %d" % seq]


def send(state: ControllerState, seq: int, targets: tuple[int, ...] | None = None) -> list[Any]:
    return state.client_sent(Batch(seq, targets), frames(seq))


def lose(state: ControllerState, index: int, others: tuple[int, ...]) -> None:
    assert state.worker_left(index) == [*map(KillWorker, others), KillWorker(index)]


def test_all_are_ended_and_started_again():
    state = up(3)
    lose(state, 1, (0, 2))
    assert state.worker_ended(2, "signal SIGKILL") == []
    assert state.worker_ended(1, "signal SIGSEGV") == []
    assert state.worker_ended(0, "signal SIGKILL") == [
        ToClient(Restarting(1, 101, (1,), "signal SIGSEGV")),
        *(StartWorker(i, request(i), 1) for i in range(3)),
    ]


def restart(state: ControllerState, index: int = 1) -> list[Any]:
    """Lose a worker of two; returns what each new one is sent, without the batch that stands for what was shortened."""
    lose(state, index, (1 - index,))
    state.worker_ended(index, "signal SIGKILL")
    state.worker_ended(1 - index, "signal SIGKILL")
    found = []
    for i in range(2):
        first, shortened, *rest = state.worker_sent(i, hello(200 + i), ())
        assert first == ToWorker(i, Replay(""))
        assert isinstance(shortened, PassToWorkers)
        assert all(one.indexes == (i,) for one in rest if isinstance(one, PassToWorkers))
        found.append([one.message if isinstance(one, ToWorker) else bytes(one.frames[0]) for one in rest])
    return found


def test_each_worker_repeats_what_it_had_done_silently_and_then_goes_on():
    state = up()
    for seq in range(3):
        send(state, seq)
    for seq in range(2):
        state.worker_sent(0, Ack(seq), ())
    assert restart(state) == [
        [b"batch 0", b"batch 1", Resume(0), b"batch 2"],
        [Resume(0), b"batch 0", b"batch 1", b"batch 2"],
    ]
    assert send(state, 3) == [PassToWorkers((0, 1), frames(3))]  # behind all of that
    assert state.worker_sent(1, Resumed(), ()) == [ToClient(WorkerUp(1, 201, "host", (1,)))]
    assert state.worker_sent(1, Ack(0), ()) == [ToClient(Ack(0))]
    assert state.worker_sent(1, Ack(1), ()) == [ToClient(Ack(1))]


def test_replies_are_given_once_and_failures_always():
    state = up()
    send(state, 0)
    for reply in (VALUE, ERROR, VALUE):
        assert state.worker_sent(0, Reply(0), reply) == [PassToClient(reply)]
    assert state.worker_left(1) == [KillWorker(0), KillWorker(1)]
    assert state.worker_sent(0, Reply(0), VALUE) == [PassToClient(VALUE)]  # said before it was ended
    state.worker_ended(1, "x")
    state.worker_ended(0, "x")
    assert ToWorker(0, Resume(3)) in state.worker_sent(0, hello(200), ())
    assert ToWorker(1, Resume(0)) in state.worker_sent(1, hello(201), ())
    assert state.worker_sent(0, Reply(0), ERROR) == [PassToClient(ERROR)]  # of the replay
    state.worker_sent(0, Resumed(), ())
    state.worker_sent(0, Reply(0), VALUE)  # the fourth
    state.worker_left(0)
    state.worker_ended(0, "x")
    state.worker_ended(1, "x")
    assert ToWorker(0, Resume(4)) in state.worker_sent(0, hello(300), ())


def test_a_loss_while_they_start_again():
    state = up()
    send(state, 0)
    lose(state, 0, (1,))
    state.worker_ended(0, "x")
    assert isinstance(state.worker_ended(1, "x")[-1], StartWorker)
    assert send(state, 1) == []
    assert state.worker_ended(1, "signal SIGKILL") == [KillWorker(0)]
    told, *starts = state.worker_ended(0, "it was not started")
    assert told == ToClient(Restarting(1, 0, (1,), "signal SIGKILL"))
    assert starts == [StartWorker(i, request(i), 2) for i in range(2)]


def test_so_often_and_no_more():
    state = up(restarts=2)
    send(state, 0)
    for _ in range(2):
        restart(state)
    state.worker_left(0)
    state.worker_ended(0, "signal SIGKILL")
    first, second, ack = state.worker_ended(1, "x")
    assert first.message.index == 0
    assert first.message.reason == "signal SIGKILL; workers had been started again 2 times without getting further"
    assert second.message.index == 1
    assert ack == ToClient(Ack(0))


@pytest.mark.parametrize("idle", [False, True])
def test_getting_further_counts(idle):
    state = up(restarts=1)
    for round_ in range(4):
        if not idle:
            send(state, round_)
        restart(state)
        for index in range(2):
            state.worker_sent(index, Resumed(), ())
        for index in range(2 * (not idle)):
            state.worker_sent(index, Ack(round_), ())


def test_who_is_to_blame():
    state = up()
    broken = Broken("all_reduce failed")
    assert state.worker_sent(0, broken, ()) == []
    lose(state, 1, (0,))  # the one that said nothing
    state.worker_ended(0, "exit code 1")
    assert state.worker_ended(1, "signal SIGKILL")[0] == ToClient(Restarting(1, 101, (1,), "signal SIGKILL"))
    state = up()
    state.worker_sent(0, broken, ())
    lose(state, 0, (1,))
    state.worker_ended(0, "exit code 1")
    assert state.worker_ended(1, "x")[0] == ToClient(Restarting(0, 100, (0,), "all_reduce failed"))


def test_who_is_to_blame_without_a_log():
    state = ControllerState(1, "here")
    state.client_sent(Hello(PROTOCOL_VERSION), ())
    for index in range(2):
        state.client_sent(request(index), ())
        state.worker_sent(index, hello(100 + index), ())
    state.worker_left(1)
    state.worker_sent(0, Broken("all_reduce failed"), ())
    state.worker_left(0)
    assert state.worker_ended(0, "exit code 1") == []
    assert state.worker_ended(1, "signal SIGKILL") == [
        ToClient(WorkerLost(1, 101, (1,), "signal SIGKILL")),
        ToClient(WorkerLost(0, 100, (0,), "all_reduce failed")),
    ]


def test_a_bug_is_not_repeated():
    state = up()
    assert state.worker_sent(0, Fault(0, "KeyError"), ()) == [ToClient(Fault(0, "KeyError"))]
    assert state.worker_left(0) == [KillWorker(0)]
    assert state.worker_ended(0, "exit code 1") == [ToClient(WorkerLost(0, 100, (0,), "exit code 1"))]


def test_what_never_came_up_is_not_replaced():
    state = up()
    state.client_sent(request(2), ())
    assert state.worker_ended(2, "exit code 1") == [ToClient(WorkerLost(2, 0, (2,), "exit code 1"))]
    state.client_sent(request(3), ())
    send(state, 0)
    lose(state, 0, (1, 3))  # one that is starting starts again with them
    for index in (0, 1, 3):
        done = state.worker_ended(index, "x")
    assert done[1:] == [StartWorker(i, request(i), 1) for i in (0, 1, 3)]
    assert b"batch 0" in [
        bytes(i.frames[0]) for i in state.worker_sent(3, hello(203), ()) if isinstance(i, PassToWorkers)
    ]


def test_a_worker_asked_for_while_the_others_end():
    state = up()
    lose(state, 0, (1,))
    assert state.client_sent(request(2), ()) == []
    assert send(state, 0) == []
    state.worker_ended(0, "x")
    assert state.worker_ended(1, "x")[-1] == StartWorker(2, request(2), 1)
    assert state.worker_sent(2, hello(202), ()) == [
        ToClient(WorkerUp(2, 202, "host", (2,))),
        PassToWorkers((2,), frames(0)),
    ]


def test_stopped_workers():
    state = up()
    state.worker_stopped(1, True)
    assert state.is_busy
    assert state.tick(10.0) == []
    state.worker_stopped(1, False)
    assert not state.is_busy
    assert state.tick(20.0) == []
    state.worker_stopped(1, True)
    assert state.tick(30.0) == []
    assert state.tick(30.9) == []
    assert state.tick(31.0) == [KillWorker(0), KillWorker(1)]
    state.worker_ended(0, "x")
    assert "a signal stopped it" in state.worker_ended(1, "signal SIGKILL")[0].message.reason


def saving(state: ControllerState, number: int, now_s: float) -> None:
    assert state.tick(now_s) == [ToWorker(i, Save(f"/snapshots/{number}-{i}")) for i in range(2)]


def test_snapshots():
    state = up(nbytes=30)
    send(state, 0)
    send(state, 1)
    state.worker_sent(0, Ack(0), ())
    saving(state, 1, 0.0)
    assert state.tick(0.1) == []  # one is being taken
    send(state, 2)
    for index in range(2):
        for seq in range(index == 0, 2):
            state.worker_sent(index, Ack(seq), ())
        assert state.worker_sent(index, Saved(50, ""), ()) == []
    sent = []
    lose(state, 1, (0,))
    state.worker_ended(0, "x")
    state.worker_ended(1, "x")
    for index in range(2):
        first, _, *rest = state.worker_sent(index, hello(200), ())
        assert first == ToWorker(index, Replay(f"/snapshots/1-{index}"))
        sent.append([one.message if isinstance(one, ToWorker) else bytes(one.frames[0]) for one in rest])
        state.worker_sent(index, Resumed(), ())
    assert sent == [[Resume(0), b"batch 2"]] * 2
    for seq in range(3, 6):
        send(state, seq)
    saving(state, 2, 0.2)  # the log is larger than it may be
    state.worker_sent(0, Saved(50, ""), ())
    assert state.worker_sent(1, Saved(50, ""), ()) == [DropSnapshot(1)]


def test_a_snapshot_of_which_a_worker_is_lost():
    state = up(nbytes=10)
    send(state, 0)
    saving(state, 1, 0.0)
    state.worker_sent(0, Saved(5, ""), ())
    assert state.worker_left(1)[0] == DropSnapshot(1)
    state.worker_ended(0, "x")
    state.worker_ended(1, "x")
    assert state.worker_sent(0, hello(200), ())[0] == ToWorker(0, Replay(""))


def test_a_snapshot_that_cannot_be_written():
    state = up(nbytes=10)
    send(state, 0)
    saving(state, 1, 0.0)
    assert state.worker_sent(0, Saved(5, "No space left on device"), ()) == [DropSnapshot(1)]
    assert state.worker_sent(1, Saved(5, ""), ()) == []
    state.worker_left(0)
    (lost,) = state.worker_ended(0, "signal SIGKILL")
    assert lost.message.reason == (
        "signal SIGKILL; it was not replaced, because the log has become too large, and a snapshot failed: "
        "No space left on device"
    )


def test_snapshots_rest(monkeypatch):
    state = up(operators=0)
    assert state._log is not None
    monkeypatch.setattr(type(state._log), "is_long", True)
    saving(state, 1, 0.0)
    for index in range(2):
        state.worker_sent(index, Saved(500, ""), ())
    assert state.tick(1.0) == []  # begins to count
    assert state.tick(10.9) == []
    saving(state, 2, 11.1)


class AgainstAModel(RuleBasedStateMachine):
    """Whatever is lost and when: each worker ends with all of its batches, run once in order, and replies are told once."""

    @initialize()
    def begin(self) -> None:
        self.state, self.seq, self.told = up(2, restarts=1 << 30), -1, -1
        self.alive = [True, True]
        self.inbox: list[list[Any]] = [[], []]
        self.ran: list[list[int]] = [[], []]
        self.replies: list[list[int]] = [[], []]
        self.replaying, self.mute = [False, False], [0, 0]
        self.names = [True, True]  # has said hello
        self.sent: list[list[int]] = [[], []]

    def carry_out(self, instructions: list[Any]) -> None:
        for one in instructions:
            if isinstance(one, PassToWorkers):
                for index in one.indexes:
                    self.inbox[index].append(one.frames)
            elif isinstance(one, ToWorker):
                self.inbox[one.index].append(one.message)
            elif isinstance(one, KillWorker) and self.alive[one.index]:
                self.end(one.index)
            elif isinstance(one, StartWorker):
                index = one.index
                self.alive[index], self.names[index] = True, False
                self.inbox[index], self.ran[index] = [], []
                self.replaying[index], self.mute[index] = False, 0
            elif isinstance(one, ToClient):
                assert not isinstance(one.message, WorkerLost)
                if isinstance(one.message, Ack):
                    assert one.message.seq > self.told
                    self.told = one.message.seq

    def end(self, index: int) -> None:
        self.alive[index] = False
        self.carry_out(self.state.worker_ended(index, "x"))

    @rule(wanted=st.sampled_from([None, (0,), (1,)]))
    def batch(self, wanted: tuple[int, ...] | None) -> None:
        self.seq += 1
        for index in wanted or (0, 1):
            self.sent[index].append(self.seq)
        self.carry_out(self.state.client_sent(Batch(self.seq, wanted), frames(self.seq)))

    @rule(index=st.integers(0, 1), steps=st.integers(1, 4), acknowledge=st.booleans())
    def work(self, index: int, steps: int, acknowledge: bool) -> None:
        if self.alive[index] and not self.names[index]:
            self.names[index] = True
            self.carry_out(self.state.worker_sent(index, hello(1), ()))
        for _ in range(steps):
            if not (self.alive[index] and self.inbox[index]):
                return
            message = self.inbox[index].pop(0)
            if isinstance(message, Replay):
                self.replaying[index] = True
            elif isinstance(message, Resume):
                self.replaying[index], self.mute[index] = False, message.replies
                self.carry_out(self.state.worker_sent(index, Resumed(), ()))
            else:
                self.run(index, message, acknowledge)

    def run(self, index: int, message: Any, acknowledge: bool) -> None:
        nodes = Reader(lambda path, offset, count: b"").read(message[1:])
        found = [node.words[1] - 1 for node in nodes if node.code == C.PUT]
        self.ran[index] += found
        if self.replaying[index]:
            return
        if self.mute[index]:
            self.mute[index] -= 1
        else:
            self.replies[index] += found
            self.carry_out(self.state.worker_sent(index, Reply(index), VALUE))
        if acknowledge and self.alive[index]:
            self.carry_out(self.state.worker_sent(index, Ack(found[0]), ()))
        elif self.alive[index]:  # it dies before it can
            self.end(index)

    @rule(index=st.integers(0, 1))
    def kill(self, index: int) -> None:
        if self.alive[index]:
            self.end(index)

    @rule()
    def shorten(self) -> None:
        assert self.state._log is not None
        if self.state._loss is None:
            pending = self.state._pending
            self.state._log.shorten(pending[0].seq - 1 if pending else self.seq)

    @precondition(lambda self: hasattr(self, "ran"))
    @invariant()
    def nothing_is_run_twice_or_told_twice(self) -> None:
        for index in range(2):
            assert self.ran[index] == sorted(set(self.ran[index]))
            assert self.replies[index] == self.sent[index][: len(self.replies[index])]

    def teardown(self) -> None:
        if not hasattr(self, "ran"):
            return
        for _ in range(200):
            for index in range(2):
                self.work(index, 4, True)
        assert self.told == self.seq
        assert self.replies == self.sent
        for index in range(2):
            assert set(self.sent[index]) <= set(self.ran[index])


AgainstAModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstAModel = AgainstAModel.TestCase
