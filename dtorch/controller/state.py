"""What the controller knows and decides: events in, instructions out.

Pure: no I/O, no clock, no threads. ``server.py`` feeds it what arrives and carries out what it returns, in order.

When a worker is lost, all of them start again and repeat what the log says. The rest may be in the middle of an operation
with the lost one, out of which nothing but their end would get all of them, and every tensor that was written since must
go back to what it was anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtorch.comm.channel import Buffer
from dtorch.controller.log import Log
from dtorch.core.errors import ProtocolError
from dtorch.protocol.commands import is_unasked
from dtorch.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    AddWorker,
    Batch,
    Broken,
    Fault,
    Hello,
    ListWorkers,
    Message,
    Ping,
    Pong,
    Replay,
    Reply,
    Restarting,
    Resume,
    Resumed,
    Save,
    Saved,
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

_STOPPED_S = 1.0
"""A worker that a signal stopped for so long is taken for lost."""
_SNAPSHOT_SHARE = 20
"""Between snapshots there is at least this many times the time that one takes."""
_AFTER_FAULT_S = 60.0
"""Before a snapshot that could not be written is tried again."""


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
class ToWorker:
    """Send a worker a message of the controller's own."""

    index: int
    message: Message


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker process; ``worker_ended`` follows if that fails. Workers of one generation meet each other."""

    index: int
    request: AddWorker
    generation: int = 0


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Delete the files of a snapshot."""

    number: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker process; ``worker_ended`` follows."""

    index: int


@dataclass(frozen=True, slots=True)
class StopAll:
    """End all workers, by force after ``grace_ms``, and then the controller."""

    grace_ms: int


Instruction = ToClient | PassToClient | PassToWorkers | ToWorker | StartWorker | DropSnapshot | KillWorker | StopAll


@dataclass(slots=True)
class _PendingBatch:
    """A batch that ``owed`` live workers have not acknowledged."""

    seq: int
    owed: int


@dataclass(slots=True)
class _Worker:
    index: int
    request: AddWorker
    state: str = "starting"  # as in WorkerInfo
    pid: int = 0
    host: str = ""
    waiting: list[Frames] = field(default_factory=list)  # batches that came while it started for the first time
    unacknowledged: deque[_PendingBatch] = field(default_factory=deque)
    done: int = -1  # the last batch that it has acknowledged
    replies: int = 0  # that the client got since then, failures and ends of saves not counted
    excuse: str = ""  # why it ends, in its own words
    has_left: bool = False  # it has closed its connection
    is_stopped: bool = False  # by a signal
    stopped_s: float | None = None  # when that was noticed

    @property
    def devices(self) -> tuple[int, ...]:
        return self.request.devices


@dataclass(slots=True)
class _Loss:
    """The loss of a worker, until all others have ended as well. ``living``: those that have not."""

    index: int
    pid: int
    reason: str
    living: set[int]


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that is being taken after batch ``seq``. ``owed``: workers that have not written theirs."""

    number: int
    seq: int
    workers: frozenset[int]
    owed: set[int]
    milliseconds: int = 0


class ControllerState:
    """One session's workers and the batches they owe.

    Args:
        pid, host: of the controller, for ``Welcome``.
        log: where what is to be repeated is kept; ``None``: a lost worker stays lost.
        restarts: how often in a row workers are started again before something new is done.
    """

    def __init__(self, pid: int, host: str, log: Log | None = None, restarts: int = 0) -> None:
        self._pid, self._host = pid, host
        self._log, self._most_attempts = log, restarts
        self._attempts = 0
        self._attempted_seq = -1  # the last batch at the time of the last loss
        self._generation = 0
        self._loss: _Loss | None = None
        self._faulty = False  # a bug was met, and would be met again
        self._told_later: list[Instruction] = []  # losses that are a consequence of another
        self._snapshot: _Snapshot | None = None
        self._snapshots = 0
        self._rest_s = 0.0  # until the next snapshot
        self._rests_until_s = 0.0
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
            index = self.add_worker(message)
            return [] if self._loss is not None else [StartWorker(index, message, self._generation)]
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

    def add_worker(self, request: AddWorker) -> int:
        """Enter one more worker, whose process somebody else starts; returns its number."""
        index = len(self._workers)
        self._workers.append(_Worker(index, request))
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
        if self._log is not None:
            self._log.append(batch.seq, tuple(targets), frames, bool(batch.shared))
        if self._starting:
            for index in targets:
                if workers[index].state == "starting":
                    workers[index].waiting.append(frames)
            targets = tuple(index for index in targets if workers[index].state in _LISTENING)
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
        if worker.state == "restarting" and self._loss is not None:
            # It is being ended. What it still says is told, and said again later unless it is known to be told.
            return self._last_words(worker, message, frames)
        if isinstance(message, Ack) and worker.state == "up":
            return self._ack(worker, message.seq)
        if isinstance(message, Reply) and worker.state in _LISTENING and message.index == index:
            worker.replies += self._log is not None and not is_unasked(frames[1])
            return [PassToClient(frames)]
        if isinstance(message, WorkerHello) and worker.state in ("starting", "restarting"):
            return self._worker_hello(worker, message)
        if isinstance(message, Resumed) and worker.state == "replaying":
            return self._resumed(worker)
        if isinstance(message, Saved) and worker.state == "up":
            return self._saved(worker, message)
        if isinstance(message, Broken):
            worker.excuse = message.text
            return []
        if isinstance(message, Fault):
            if worker.state == "restarting" and self._can_restart(worker):
                worker.excuse = message.text  # devices may not be free again yet
                return []
            self._faulty = True
            return [ToClient(Fault(index, message.text))]
        raise ProtocolError(f"worker {index}, which is {worker.state}, sent {message!r:.200}")

    def worker_broke(self, index: int, text: str) -> list[Instruction]:
        """A worker sent something that is no message, or has no place."""
        if self._closing:
            return []
        self._faulty = True
        return [ToClient(Fault(index, text)), KillWorker(index)]

    def worker_forked(self, index: int, pid: int) -> None:
        """A worker has become a process."""
        self._workers[index].pid = pid

    def worker_stopped(self, index: int, stopped: bool) -> None:
        """A signal has stopped a worker, or it goes on."""
        worker = self._workers[index]
        worker.is_stopped, worker.stopped_s = stopped, None

    def worker_left(self, index: int) -> list[Instruction]:
        """A worker has closed its connection: it is ending, or has lost its mind; ``worker_ended`` follows."""
        worker = self._workers[index]
        worker.has_left = True
        return [*self._lose(worker), KillWorker(index)]

    def worker_ended(self, index: int, reason: str) -> list[Instruction]:
        """A worker process has ended, or could not be started; everything it had sent has been reported."""
        worker = self._workers[index]
        if worker.state == "lost":
            return []
        worker.is_stopped = False
        instructions = self._lose(worker)
        loss = self._loss
        if loss is not None:
            loss.living.discard(index)
            if index == loss.index:
                loss.reason = loss.reason or reason
            return instructions if loss.living else instructions + self._restart(loss)
        dropped = self._drop(worker, worker.excuse or reason)
        if worker.excuse and any(w.has_left and w.state != "lost" and not w.excuse for w in self._workers):
            self._told_later += dropped  # after the one that is to blame
            return self._acknowledge()
        told, self._told_later = dropped + self._told_later, []
        return [*told, *self._acknowledge()]

    def tick(self, now_s: float) -> list[Instruction]:
        """To be called a few times a second while anything happens, with a clock that never goes back."""
        if self._closing:
            return []
        instructions: list[Instruction] = []
        for worker in self._workers:
            if worker.is_stopped:
                worker.stopped_s = now_s if worker.stopped_s is None else worker.stopped_s
                if now_s - worker.stopped_s >= _STOPPED_S:
                    worker.is_stopped = False
                    worker.excuse = f"a signal stopped it, and it did not go on within {_STOPPED_S:g} s"
                    instructions += [*self._lose(worker), KillWorker(worker.index)]
        log = self._log
        if log is not None and self._loss is None:
            log.tend(self._pending[0].seq - 1 if self._pending else self._last_seq)
            instructions += self._begin_snapshot(log, now_s)
        return instructions

    @property
    def is_busy(self) -> bool:
        """Whether ``tick`` has anything to look at."""
        return bool(self._pending) or any(worker.is_stopped for worker in self._workers)

    # Losing workers and starting them again

    def _can_restart(self, worker: _Worker) -> bool:
        return self._log is not None and not self._log.fault and not self._faulty and worker.state in _REPLACED

    def _lose(self, worker: _Worker) -> list[Instruction]:
        """A worker is lost: end the others, unless they are being ended or this is the end of the session."""
        if self._closing or self._loss is not None or not self._can_restart(worker):
            return []
        living = [w for w in self._workers if w.state != "lost"]
        self._loss = _Loss(worker.index, worker.pid, worker.excuse, {w.index for w in living})
        for w in living:
            w.state = "restarting"
            w.waiting.clear()
        self._starting = len(living)
        abandoned, self._snapshot = self._snapshot, None
        drop: list[Instruction] = [] if abandoned is None else [DropSnapshot(abandoned.number)]
        return drop + [KillWorker(w.index) for w in living if w is not worker]

    def _last_words(self, worker: _Worker, message: Message, frames: Frames) -> list[Instruction]:
        if isinstance(message, Ack):
            return self._ack(worker, message.seq)
        if isinstance(message, Reply) and message.index == worker.index:
            worker.replies += not is_unasked(frames[1])
            return [PassToClient(frames)]
        return []

    def _restart(self, loss: _Loss) -> list[Instruction]:
        """All workers have ended: start them again, unless that has been tried often enough."""
        self._loss = None
        worker = self._workers[loss.index]
        pid, reason = loss.pid or worker.pid, loss.reason
        again = [w for w in self._workers if w.state != "lost"]
        self._attempts += 1
        if self._attempts > self._most_attempts:
            reason += f"; workers had been started again {self._most_attempts} times without getting further"
            worker.pid = pid
            lost = self._drop(worker, reason)
            for w in again:
                if w is not worker:
                    lost += self._drop(w, f"worker {worker.index} was lost, and the others ended with it")
            return lost + self._acknowledge()
        self._attempted_seq = self._last_seq
        self._generation += 1
        told: list[Instruction] = [ToClient(Restarting(worker.index, pid, worker.devices, reason))]
        for w in again:
            w.pid, w.excuse, w.is_stopped, w.has_left = 0, "", False, False
        return told + [StartWorker(w.index, w.request, self._generation) for w in again]

    def _replay(self, worker: _Worker, log: Log) -> list[Instruction]:
        """Bring a new worker to where the one was that it replaces, and on."""
        index, to = worker.index, (worker.index,)
        instructions: list[Instruction] = [ToWorker(index, Replay(log.snapshot_path(index)))]
        instructions += [PassToWorkers(to, frames) for frames in log.past(index, worker.done)]
        instructions.append(ToWorker(index, Resume(worker.replies)))
        return instructions + [PassToWorkers(to, frames) for frames in log.open(index, worker.done)]

    def _resumed(self, worker: _Worker) -> list[Instruction]:
        worker.state = "up"
        if not self._pending and all(w.state in ("up", "lost") for w in self._workers):
            self._attempts = 0
        return [ToClient(WorkerUp(worker.index, worker.pid, worker.host, worker.devices))]

    def _drop(self, worker: _Worker, reason: str) -> list[Instruction]:
        """A worker is lost for good."""
        self._starting -= worker.state in ("starting", "restarting")
        worker.state = "lost"
        worker.waiting.clear()
        self._live = tuple(i for i in self._live if i != worker.index)
        for pending in worker.unacknowledged:
            pending.owed -= 1
        worker.unacknowledged.clear()
        if self._closing:
            return []
        if self._log is not None and self._log.fault:
            reason += f"; it was not replaced, because {self._log.fault}"
        return [ToClient(WorkerLost(worker.index, worker.pid, worker.devices, reason))]

    def _worker_hello(self, worker: _Worker, message: WorkerHello) -> list[Instruction]:
        if message.version != PROTOCOL_VERSION:
            raise ProtocolError(f"worker {worker.index} speaks protocol {message.version}, not {PROTOCOL_VERSION}")
        worker.pid, worker.host = message.pid, message.host
        self._starting -= 1
        if worker.state == "restarting":
            assert self._log is not None, "without a log nothing is started again"
            worker.state = "replaying"
            return self._replay(worker, self._log)
        worker.state = "up"
        waiting, worker.waiting = worker.waiting, []
        instructions: list[Instruction] = [ToClient(WorkerUp(worker.index, worker.pid, worker.host, worker.devices))]
        return instructions + [PassToWorkers((worker.index,), frames) for frames in waiting]

    # Snapshots

    def _begin_snapshot(self, log: Log, now_s: float) -> list[Instruction]:
        """Let all workers write down what they hold, if that is wanted and was not done a short while ago."""
        if self._rest_s:
            self._rests_until_s, self._rest_s = now_s + self._rest_s, 0.0
        live = [worker for worker in self._workers if worker.state != "lost"]
        if self._snapshot is not None or not log.is_long or any(worker.state != "up" for worker in live):
            return []
        if now_s < self._rests_until_s and not log.is_large:
            return []
        self._snapshots += 1
        indexes = frozenset(worker.index for worker in live)
        self._snapshot = _Snapshot(self._snapshots, self._last_seq, indexes, set(indexes))
        return [ToWorker(worker.index, Save(log.path(self._snapshots, worker.index))) for worker in live]

    def _saved(self, worker: _Worker, message: Saved) -> list[Instruction]:
        snapshot, log = self._snapshot, self._log
        if snapshot is None or log is None:
            return []  # given up meanwhile
        if message.fault:
            self._snapshot = None
            self._rest_s = max(_AFTER_FAULT_S, _SNAPSHOT_SHARE * message.milliseconds / 1000)
            if log.is_large:
                log.give_up(f"the log has become too large, and a snapshot failed: {message.fault}")
            return [DropSnapshot(snapshot.number)]
        snapshot.owed.discard(worker.index)
        snapshot.milliseconds = max(snapshot.milliseconds, message.milliseconds)
        if snapshot.owed:
            return []
        self._snapshot, self._rest_s = None, _SNAPSHOT_SHARE * snapshot.milliseconds / 1000
        last = log.cut(snapshot.seq, snapshot.number, snapshot.workers)
        return [] if last is None else [DropSnapshot(last)]

    # Acknowledgements

    def _ack(self, worker: _Worker, seq: int) -> list[Instruction]:
        unacknowledged = worker.unacknowledged
        if not unacknowledged or unacknowledged[0].seq != seq:
            expected = unacknowledged[0].seq if unacknowledged else "none"
            raise ProtocolError(f"worker {worker.index} acknowledged batch {seq}, expected was {expected}")
        pending = unacknowledged.popleft()
        pending.owed -= 1
        worker.done, worker.replies = seq, 0
        return [] if pending.owed else self._acknowledge()

    def _acknowledge(self) -> list[Instruction]:
        """Tell the client up to where all live workers have come, if that has advanced."""
        done, pending = None, self._pending
        while pending and not pending[0].owed:
            done = pending.popleft().seq
        if done is None:
            return []
        if done >= self._attempted_seq:
            self._attempts = 0
        return [ToClient(Ack(done))]

    @staticmethod
    def _info(worker: _Worker) -> WorkerInfo:
        return WorkerInfo(worker.index, worker.pid, worker.host, worker.devices, worker.state)


_LISTENING = ("up", "replaying")
"""States in which a worker gets batches."""
_REPLACED = ("up", "replaying", "restarting")
"""States in which a worker that is lost was once up, so that another may come up in its place."""
