"""What the controller knows and decides: events in, instructions out.

Pure: no I/O, no clock, no threads. ``server.py`` feeds it what arrives and carries out what it returns, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtorch.comm.channel import Buffer
from dtorch.core.errors import ProtocolError
from dtorch.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AddWorker,
    Batch,
    Fault,
    Hello,
    ListWorkers,
    Message,
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

Frames = Sequence[Buffer]
"""A message as it arrived, header included; never looked into here."""


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send the client a message of the controller's own."""

    message: Message


@dataclass(frozen=True, slots=True)
class PassToClient:
    """Send the client what a worker sent, unchanged."""

    frames: Frames


@dataclass(frozen=True, slots=True)
class PassToWorkers:
    """Send these workers what the client sent, unchanged."""

    indexes: Sequence[int]
    frames: Frames


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker process; ``worker_ended`` follows if that fails."""

    index: int
    request: AddWorker


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker process; ``worker_ended`` follows."""

    index: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """End all workers, by force after ``grace_ms``, and then the controller."""

    grace_ms: int


Instruction = ToClient | PassToClient | PassToWorkers | StartWorker | KillWorker | StopAll


@dataclass(slots=True)
class _PendingBatch:
    """A batch that ``owed`` live workers have not acknowledged."""

    seq: int
    owed: int


@dataclass(slots=True)
class _Worker:
    index: int
    devices: tuple[int, ...]
    state: str = "starting"  # as in WorkerInfo
    pid: int = 0
    host: str = ""
    waiting: list[Frames] = field(default_factory=list)  # batches that came while it started
    unacknowledged: deque[_PendingBatch] = field(default_factory=deque)


class ControllerState:
    """One session's workers and the batches they owe.

    Args:
        pid, host: of the controller, for ``Welcome``.
    """

    def __init__(self, pid: int, host: str) -> None:
        self._pid, self._host = pid, host
        self._greeted = False
        self._closing = False
        self._workers: list[_Worker] = []
        self._live: tuple[int, ...] = ()  # not lost, by number
        self._starting = 0
        self._pending: deque[_PendingBatch] = deque()  # by seq; those at the front are owed
        self._last_seq = -1

    # Events from the client

    def client_sent(self, message: Message, frames: Frames) -> list[Instruction]:
        """A message of the client.

        Raises:
            ProtocolError: it has no place here; nothing has changed.
        """
        if self._closing:
            return []
        if isinstance(message, Batch) and self._greeted:
            return self._batch(message, frames)
        if isinstance(message, Hello) and not self._greeted:
            return self._hello(message)
        if not self._greeted:
            raise ProtocolError(f"the first message of a client is Hello, not {type(message).__name__}")
        if isinstance(message, AddWorker):
            return [StartWorker(self.add_worker(message.devices), message)]
        if isinstance(message, ListWorkers):
            return [ToClient(WorkerList(tuple(self._info(worker) for worker in self._workers)))]
        if isinstance(message, Ping):
            return [ToClient(Pong(message.token))]
        if isinstance(message, Shutdown):
            self._closing = True
            return [StopAll(message.grace_ms)]
        raise ProtocolError(f"a client does not send {type(message).__name__}")

    def client_gone(self) -> list[Instruction]:
        """The client has closed its connection or has ended."""
        self._closing = True
        return [StopAll(grace_ms=0)]

    def add_worker(self, devices: tuple[int, ...]) -> int:
        """Enter one more worker, whose process somebody else starts; returns its number."""
        index = len(self._workers)
        self._workers.append(_Worker(index, devices))
        self._live = (*self._live, index)
        self._starting += 1
        return index

    def _hello(self, message: Hello) -> list[Instruction]:
        if message.version != PROTOCOL_VERSION:
            self._closing = True
            text = (
                f"the client speaks protocol version {message.version}, the controller {PROTOCOL_VERSION}; install the "
                "same version of dtorch for both"
            )
            return [ToClient(Fault(None, text)), StopAll(grace_ms=0)]
        self._greeted = True
        return [ToClient(Welcome(PROTOCOL_VERSION, self._pid, self._host))]

    def _batch(self, batch: Batch, frames: Frames) -> list[Instruction]:
        if batch.seq <= self._last_seq:
            raise ProtocolError(f"batch {batch.seq} came after batch {self._last_seq}; numbers must rise")
        targets = self._live if batch.targets is None else self._live_targets(batch.seq, batch.targets)
        self._last_seq = batch.seq
        pending = _PendingBatch(batch.seq, len(targets))
        self._pending.append(pending)
        workers = self._workers
        for index in targets:
            workers[index].unacknowledged.append(pending)
        if self._starting:
            for index in targets:
                if workers[index].state == "starting":
                    workers[index].waiting.append(frames)
            targets = tuple(index for index in targets if workers[index].state == "up")
        instructions: list[Instruction] = [PassToWorkers(targets, frames)] if targets else []
        return instructions if pending.owed else instructions + self._acknowledge()

    def _live_targets(self, seq: int, targets: tuple[int, ...]) -> tuple[int, ...]:
        for index in targets:
            if index >= len(self._workers):
                raise ProtocolError(f"batch {seq} is for worker {index}, but there are {len(self._workers)} workers")
        return tuple(index for index in dict.fromkeys(targets) if self._workers[index].state != "lost")

    # Events from workers

    def worker_sent(self, index: int, message: Message, frames: Frames) -> list[Instruction]:
        """A message of a worker, which has not been reported as ended.

        Raises:
            ProtocolError: it has no place here; nothing has changed.
        """
        worker = self._workers[index]
        if self._closing:
            return []
        if isinstance(message, Ack) and worker.state == "up":
            return self._ack(worker, message.seq)
        if isinstance(message, Reply) and worker.state == "up" and message.index == index:
            return [PassToClient(frames)]
        if isinstance(message, WorkerHello) and worker.state == "starting":
            return self._worker_hello(worker, message)
        if isinstance(message, Fault):
            return [ToClient(Fault(index, message.text))]
        raise ProtocolError(f"worker {index}, which is {worker.state}, sent {message!r:.200}")

    def worker_broke(self, index: int, text: str) -> list[Instruction]:
        """A worker sent something that is no message, or has no place."""
        if self._closing:
            return []
        return [ToClient(Fault(index, text)), KillWorker(index)]

    def worker_forked(self, index: int, pid: int) -> None:
        """A worker has become a process."""
        self._workers[index].pid = pid

    def worker_ended(self, index: int, reason: str) -> list[Instruction]:
        """A worker process has ended, or could not be started; everything it had sent has been reported."""
        worker = self._workers[index]
        if worker.state == "lost":
            return []
        self._starting -= worker.state == "starting"
        worker.state = "lost"
        worker.waiting.clear()
        self._live = tuple(i for i in self._live if i != index)
        for pending in worker.unacknowledged:
            pending.owed -= 1
        worker.unacknowledged.clear()
        if self._closing:
            return []
        return [ToClient(WorkerLost(index, worker.pid, worker.devices, reason)), *self._acknowledge()]

    def _worker_hello(self, worker: _Worker, message: WorkerHello) -> list[Instruction]:
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(f"worker {worker.index} speaks protocol {message.version}, not {PROTOCOL_VERSION}")
        worker.state, worker.pid, worker.host = "up", message.pid, message.host
        self._starting -= 1
        waiting, worker.waiting = worker.waiting, []
        instructions: list[Instruction] = [ToClient(WorkerUp(worker.index, worker.pid, worker.host, worker.devices))]
        return instructions + [PassToWorkers((worker.index,), frames) for frames in waiting]

    def _ack(self, worker: _Worker, seq: int) -> list[Instruction]:
        unacknowledged = worker.unacknowledged
        if not unacknowledged or unacknowledged[0].seq != seq:
            expected = unacknowledged[0].seq if unacknowledged else "none"
            raise ProtocolError(f"worker {worker.index} acknowledged batch {seq}, expected was {expected}")
        pending = unacknowledged.popleft()
        pending.owed -= 1
        return [] if pending.owed else self._acknowledge()

    def _acknowledge(self) -> list[Instruction]:
        """Tell the client up to where all live workers have come, if that has advanced."""
        done, pending = None, self._pending
        while pending and not pending[0].owed:
            done = pending.popleft().seq
        return [] if done is None else [ToClient(Ack(done))]

    @staticmethod
    def _info(worker: _Worker) -> WorkerInfo:
        return WorkerInfo(worker.index, worker.pid, worker.host, worker.devices, worker.state)
