"""What the controller decides, without any process or socket."""

import ast
import inspect

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dtorch.controller.state as state_module
from dtorch.controller.state import (
    ControllerState,
    KillWorker,
    PassToClient,
    PassToWorkers,
    StartWorker,
    StopAll,
    ToClient,
)
from dtorch.core.errors import ProtocolError
from dtorch.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AddWorker,
    Batch,
    Fault,
    Hello,
    ListWorkers,
    Ping,
    Pong,
    Reply,
    Shutdown,
    Welcome,
    WorkerHello,
    WorkerInfo,
    WorkerList,
    WorkerLost,
    WorkerUp,
)

UP = WorkerHello(PROTOCOL_VERSION, 100, "host")


def greeted(workers=0):
    state = ControllerState(1, "here")
    assert state.client_sent(Hello(PROTOCOL_VERSION), ()) == [ToClient(Welcome(PROTOCOL_VERSION, 1, "here"))]
    for index in range(workers):
        request = AddWorker((index,), 1, {})
        assert state.client_sent(request, ()) == [StartWorker(index, request)]
        assert state.worker_sent(index, UP, ()) == [ToClient(WorkerUp(index, 100, "host", (index,)))]
    return state


def send(state, seq, targets=None):
    return state.client_sent(Batch(seq, targets), (seq,))


def test_it_is_pure():
    tree = ast.parse(inspect.getsource(state_module))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not names & {"zmq", "socket", "select", "threading", "time", "os", "asyncio"}


def test_a_batch_goes_to_all_workers_and_the_slowest_decides():
    state = greeted(3)
    assert send(state, 0) == [PassToWorkers((0, 1, 2), (0,))]
    assert send(state, 1) == [PassToWorkers((0, 1, 2), (1,))]
    for index, seq, told in [(0, 0, []), (0, 1, []), (1, 0, []), (2, 0, [0]), (2, 1, []), (1, 1, [1])]:
        assert state.worker_sent(index, Ack(seq), ()) == [ToClient(Ack(done)) for done in told]


def test_targets():
    state = greeted(3)
    assert send(state, 5, (2, 0, 2)) == [PassToWorkers((2, 0), (5,))]
    assert send(state, 6, ()) == []
    assert send(state, 7, (1,)) == [PassToWorkers((1,), (7,))]
    assert state.worker_sent(1, Ack(7), ()) == []  # 5 is still owed
    assert state.worker_sent(0, Ack(5), ()) == []
    assert state.worker_sent(2, Ack(5), ()) == [ToClient(Ack(7))]
    with pytest.raises(ProtocolError, match="batch 8 is for worker 3, but there are 3 workers"):
        send(state, 8, (3,))
    assert send(state, 8, ()) == [ToClient(Ack(8))]


def test_a_batch_for_nobody_is_done_at_once():
    assert send(greeted(0), 0) == [ToClient(Ack(0))]


def test_a_late_worker_gets_what_came_after_its_request_when_it_is_up():
    state = greeted(1)
    send(state, 0)
    state.client_sent(AddWorker((7,), 2, {}), ())
    assert send(state, 1) == [PassToWorkers((0,), (1,))]
    assert send(state, 2, (1,)) == []
    assert state.worker_sent(0, Ack(0), ()) == [ToClient(Ack(0))]
    assert state.worker_sent(0, Ack(1), ()) == []
    assert state.worker_sent(1, UP, ()) == [
        ToClient(WorkerUp(1, 100, "host", (7,))),
        PassToWorkers((1,), (1,)),
        PassToWorkers((1,), (2,)),
    ]
    assert send(state, 3) == [PassToWorkers((0, 1), (3,))]
    assert state.worker_sent(1, Ack(1), ()) == [ToClient(Ack(1))]


def test_what_a_lost_worker_owed_is_owed_no_more():
    state = greeted(2)
    send(state, 0)
    send(state, 1, (1,))
    assert state.worker_sent(0, Ack(0), ()) == []
    assert state.worker_ended(1, "signal SIGKILL") == [
        ToClient(WorkerLost(1, 100, (1,), "signal SIGKILL")),
        ToClient(Ack(1)),
    ]
    assert state.worker_ended(1, "again") == []
    assert send(state, 2, (1,)) == [ToClient(Ack(2))]
    assert send(state, 3) == [PassToWorkers((0,), (3,))]


def test_a_worker_that_never_came_up():
    state = greeted(0)
    state.client_sent(AddWorker((3, 4), 1, {}), ())
    send(state, 0)
    state.worker_forked(0, 55)
    assert state.worker_ended(0, "exit code 1") == [
        ToClient(WorkerLost(0, 55, (3, 4), "exit code 1")),
        ToClient(Ack(0)),
    ]


def test_replies_and_faults_go_to_the_client():
    state = greeted(1)
    assert state.worker_sent(0, Reply(0), ("frames",)) == [PassToClient(("frames",))]
    assert state.worker_sent(0, Fault(9, "bug"), ()) == [ToClient(Fault(0, "bug"))]
    assert state.worker_broke(0, "noise") == [ToClient(Fault(0, "noise")), KillWorker(0)]


def test_questions():
    state = greeted(1)
    state.client_sent(AddWorker((1,), 1, {}), ())
    rows = (WorkerInfo(0, 100, "host", (0,), "up"), WorkerInfo(1, 0, "", (1,), "starting"))
    assert state.client_sent(ListWorkers(), ()) == [ToClient(WorkerList(rows))]
    state.worker_ended(1, "x")
    (answer,) = state.client_sent(ListWorkers(), ())
    assert answer.message.workers[1].state == "lost"
    assert state.client_sent(Ping(9), ()) == [ToClient(Pong(9))]


def test_after_shutdown_nothing_is_told():
    state = greeted(2)
    send(state, 0)
    assert state.client_sent(Shutdown(300), ()) == [StopAll(300)]
    assert send(state, 1) == []
    assert state.worker_sent(0, Ack(0), ()) == []
    assert state.worker_ended(0, "exit code 0") == []
    assert state.worker_broke(1, "noise") == []
    assert greeted(1).client_gone() == [StopAll(0)]


def test_versions_must_agree():
    state = ControllerState(1, "here")
    fault, stop = state.client_sent(Hello(PROTOCOL_VERSION + 1), ())
    assert "install the same version" in fault.message.text
    assert stop == StopAll(0)
    state = greeted(0)
    state.client_sent(AddWorker((0,), 1, {}), ())
    with pytest.raises(ProtocolError, match="speaks protocol"):
        state.worker_sent(0, WorkerHello(PROTOCOL_VERSION + 1, 5, "host"), ())


@pytest.mark.parametrize("message", [Ping(1), Batch(0, None), Shutdown(0)])
def test_hello_comes_first(message):
    with pytest.raises(ProtocolError, match="is Hello, not"):
        ControllerState(1, "here").client_sent(message, ())


@pytest.mark.parametrize("message", [Hello(1), Ack(0), WorkerHello(1, 1, "")])
def test_what_a_client_does_not_send(message):
    with pytest.raises(ProtocolError, match="does not send"):
        greeted(0).client_sent(message, ())


@pytest.mark.parametrize("message", [Ack(1), Ack(7), Reply(1), WorkerHello(1, 1, ""), Ping(1)])
def test_what_a_worker_may_not_send(message):
    state = greeted(2)
    send(state, 0)
    with pytest.raises(ProtocolError, match="worker 0"):
        state.worker_sent(0, message, ())
    assert state.worker_sent(0, Ack(0), ()) == []


def test_batch_numbers_rise():
    state = greeted(1)
    send(state, 4)
    with pytest.raises(ProtocolError, match="batch 4 came after batch 4"):
        send(state, 4)


class AgainstAModel(RuleBasedStateMachine):
    """Any order of events: batches arrive complete and in order, and the acknowledged minimum is right."""

    @initialize()
    def begin(self):
        self.state, self.seq, self.told = greeted(0), -1, -1
        self.status, self.owed, self.got = [], [], []  # by worker: its state, batches not acknowledged, not received

    def carry_out(self, instructions):
        for instruction in instructions:
            if isinstance(instruction, PassToWorkers):
                for index in instruction.indexes:
                    assert self.status[index] == "up"
                    assert self.got[index].pop(0) == instruction.frames[0]
            elif isinstance(instruction, ToClient) and isinstance(instruction.message, Ack):
                assert instruction.message.seq > self.told
                self.told = instruction.message.seq

    @rule()
    def add(self):
        self.carry_out(self.state.client_sent(AddWorker((0,), 1, {}), ()))
        self.status.append("starting")
        self.owed.append([])
        self.got.append([])

    @rule(wanted=st.none() | st.lists(st.integers(0, 5), max_size=4))
    def batch(self, wanted):
        self.seq += 1
        targets = None if wanted is None else tuple(t for t in wanted if t < len(self.status))
        for index, status in enumerate(self.status):
            if status != "lost" and (targets is None or index in targets):
                self.owed[index].append(self.seq)
                self.got[index].append(self.seq)
        self.carry_out(send(self.state, self.seq, targets))

    @precondition(lambda self: self.status)
    @rule(data=st.data())
    def something_about_a_worker(self, data):
        index = data.draw(st.integers(0, len(self.status) - 1))
        if self.status[index] == "starting" and data.draw(st.booleans()):
            self.status[index] = "up"
            self.carry_out(self.state.worker_sent(index, UP, ()))
        elif self.status[index] == "up" and self.owed[index] and data.draw(st.integers(0, 4)):
            self.carry_out(self.state.worker_sent(index, Ack(self.owed[index].pop(0)), ()))
        elif self.status[index] != "lost":
            self.status[index] = "lost"
            self.owed[index], self.got[index] = [], []
            self.carry_out(self.state.worker_ended(index, "x"))

    @invariant()
    def everything_is_where_it_should_be(self):
        if hasattr(self, "status"):
            assert all(not got for got, status in zip(self.got, self.status, strict=True) if status == "up")
            assert self.told == min([owed[0] - 1 for owed in self.owed if owed], default=self.seq)


AgainstAModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAgainstAModel = AgainstAModel.TestCase
