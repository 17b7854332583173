"""The controller's I/O: connections to events, instructions to connections. What to do is decided in ``state.py``."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dtorch.comm.channel import MAX_MESSAGE_BYTES, Buffer, Channel, ChannelClosedError, Frame, pack
from dtorch.controller.log import Log
from dtorch.controller.loop import Loop
from dtorch.controller.pool import PoolSpawner
from dtorch.controller.spawner import NullSpawner, Spawner, TemplateSpawner
from dtorch.controller.state import (
    ControllerState,
    DropSnapshot,
    Instruction,
    KillWorker,
    PassToClient,
    PassToWorkers,
    StartWorker,
    StopAll,
    ToClient,
    ToWorker,
)
from dtorch.core.errors import CommError, ProtocolError
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import AddWorker, Exited, Fault, Forked, Stopped

_STOP_MARGIN_S = 0.5
"""What the template gets, after the workers' grace, to end them by force and itself."""
_MOST_DESCRIPTORS = 512
"""Beyond so many descriptors none are spent on files that others may remove."""
_TICK_S = 0.25
"""How often the state looks at the clock while anything happens."""


@dataclass(frozen=True)
class ControllerConfig:
    """What a controller of one machine is started with.

    Attributes:
        client_fd: the descriptor of the connection to the client.
        census_fd: a descriptor that every process below inherits, see ``dtorch.launch.local``.
        session_dir: the session's private directory.
        executor: ``module:name`` of what workers run batches with.
        physical: the torch device type on which workers keep tensors.
        null_workers: how many null workers there are instead of real ones.
        restarts: see ``ControllerState``; 0 keeps no log.
        log_operators, log_bytes: see ``Log``.
        pool_fd: the descriptor of a connection to a pool whose workers are used; -1: workers are children.
        message_bytes: most bytes of a message of the client.
        memory: most bytes of memory of this process; 0: no limit.
    """

    client_fd: int
    census_fd: int
    session_dir: str
    executor: str
    physical: str
    null_workers: int = 0
    restarts: int = 0
    log_operators: int = 0
    log_bytes: int = 0
    pool_fd: int = -1
    message_bytes: int = MAX_MESSAGE_BYTES
    memory: int = 0

    @property
    def peers_dir(self) -> str:
        """Where workers meet to form process groups."""
        return f"{self.session_dir}/peers"

    @property
    def snapshots_dir(self) -> str:
        """Where workers write snapshots."""
        return f"{self.session_dir}/snapshots"


class Server:
    """Serves one client until it says so or is gone.

    Args:
        config: how this was started.
        client: the connection to it.
        state: what decides; ``log`` is its log, which is kept short here in idle moments.
    """

    def __init__(self, config: ControllerConfig, client: Channel, state: ControllerState, log: Log | None) -> None:
        self._client, self._state, self._log = client, state, log
        self._snapshots_dir = config.snapshots_dir
        self._loop = Loop()
        self._workers: dict[int, Channel] = {}
        self._instructions: deque[Instruction] = deque()
        self._performing = False
        self._stop_at: float | None = None
        self._tick_at = 0.0
        self._loop.watch(client, self._on_client)
        self._spawner = self._make_spawner(config)

    def run(self) -> None:
        """Serve; returns when all workers have ended."""
        while not self._spawner.stopped or self._stop_at is None:
            now_s = time.monotonic()
            if self._stop_at is not None:
                if now_s >= self._stop_at:
                    self._spawner.abandon()
                else:
                    self._loop.step(self._stop_at - now_s)
                continue
            if now_s >= self._tick_at:
                self._tick_at = now_s + _TICK_S
                self._spawner.check(now_s)
                self._perform(self._state.tick(now_s))
            log = self._log
            if log is None or not log.has_work:
                self._loop.step(_TICK_S if self._state.is_busy else None)
            elif not self._loop.step(0) or log.is_behind:  # whoever waits comes first
                log.work()

    def _make_spawner(self, config: ControllerConfig) -> Spawner:
        if config.null_workers:
            requests = [AddWorker((i,), 1, {}) for i in range(config.null_workers)]
            connections = [self._connect(self._state.add_worker(request)) for request in requests]
            return NullSpawner(self._on_report, connections, config.census_fd)
        if config.pool_fd >= 0:
            return PoolSpawner(self._loop, self._on_report, socket.socket(fileno=config.pool_fd))
        settings = {"executor": config.executor, "physical": config.physical, "peers_dir": config.peers_dir}
        return TemplateSpawner(self._loop, self._on_report, settings, config.census_fd)

    # What arrives

    def _on_client(self, readable: bool, writable: bool) -> None:
        if writable:
            self._flush(self._client)
        if not readable:
            return
        try:
            self._client.read()
            while (frames := self._client.take()) is not None:
                self._from_client(frames)
        except (CommError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._perform([ToClient(Fault(None, f"the controller got what is no message: {error}"))])
            self._loop.unwatch(self._client)
            self._perform(self._state.client_gone())

    def _from_client(self, frames: list[Frame]) -> None:
        try:
            instructions = self._state.client_sent(decode(frames[0]), frames)
        except ProtocolError as error:
            instructions = [ToClient(Fault(None, f"the controller got a wrong message: {error}"))]
        self._perform(instructions)
        if self._log is not None:
            self._log.settle()  # while the workers are at it already

    def _on_worker(self, index: int, readable: bool, writable: bool) -> None:
        channel = self._workers[index]
        if writable:
            self._flush(channel)
        if not readable:
            return
        try:
            channel.read()
            self._take(index, channel)
        except ProtocolError as error:
            self._loop.unwatch(channel)
            self._perform(self._state.worker_broke(index, str(error)))
        except ChannelClosedError:
            self._loop.unwatch(channel)
            self._perform(self._state.worker_left(index))

    def _take(self, index: int, channel: Channel) -> None:
        """Handle what has been read from a worker."""
        while (frames := channel.take()) is not None:
            self._perform(self._state.worker_sent(index, decode(frames[0]), frames))

    def _on_report(self, report: Forked | Exited | Stopped) -> None:
        if isinstance(report, Forked):
            self._state.worker_forked(report.index, report.pid)
            return
        if isinstance(report, Stopped):
            self._state.worker_stopped(report.index, bool(report.stopped))
            return
        channel = self._workers.get(report.index)
        if channel is None:
            return
        self._read_last_words(report.index, channel)
        self._loop.unwatch(channel)
        del self._workers[report.index]
        channel.close()
        self._perform(self._state.worker_ended(report.index, report.reason))

    def _read_last_words(self, index: int, channel: Channel) -> None:
        """All that a worker had sent before its end is in the socket by now."""
        try:
            while channel.read():
                self._take(index, channel)
        except (CommError, ProtocolError):
            return  # the normal end, or that of a worker whose messages had gone wrong

    # What is to be done

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        """Carry them out, after those whose carrying out led here."""
        self._instructions.extend(instructions)
        if self._performing:
            return
        self._performing = True
        while self._instructions:
            self._carry_out(self._instructions.popleft())
        self._performing = False

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, PassToWorkers):
            pieces = pack(instruction.frames)
            for index in instruction.indexes:
                self._post(self._workers[index], pieces)
        elif isinstance(instruction, ToClient):
            self._post(self._client, pack([encode(instruction.message)]))
        elif isinstance(instruction, PassToClient):
            self._post(self._client, pack(instruction.frames))
        elif isinstance(instruction, ToWorker):
            self._post(self._workers[instruction.index], pack([encode(instruction.message)]))
        elif isinstance(instruction, StartWorker):
            self._start(instruction)
        elif isinstance(instruction, KillWorker):
            self._spawner.kill(instruction.index)
        elif isinstance(instruction, StopAll):
            self._stop(instruction.grace_ms)
        else:
            self._delete(instruction)

    def _start(self, start: StartWorker) -> None:
        try:
            connection = self._connect(start.index)
        except OSError as error:
            self._perform(self._state.worker_ended(start.index, f"the controller has no more descriptors: {error}"))
            return
        self._spawner.start(start.index, start.request, connection, start.generation)

    def _delete(self, drop: DropSnapshot) -> None:
        for path in Path(self._snapshots_dir).glob(f"{drop.number}-*"):
            with contextlib.suppress(FileNotFoundError):  # the session is ending
                path.unlink()

    def _connect(self, index: int) -> socket.socket:
        """Watch one end of a new connection for a worker; returns the other."""
        ours, theirs = socket.socketpair()
        channel = self._workers[index] = Channel(ours)
        self._loop.watch(channel, partial(self._on_worker, index))
        return theirs

    def _stop(self, grace_ms: int) -> None:
        self._stop_at = time.monotonic() + grace_ms / 1000 + _STOP_MARGIN_S
        self._spawner.stop(grace_ms)

    def _post(self, channel: Channel, pieces: Sequence[Buffer]) -> None:
        try:
            sent = channel.post(pieces)
        except ChannelClosedError:
            return  # its end is read next
        if not sent:
            self._loop.want_write(channel, True)

    def _flush(self, channel: Channel) -> None:
        try:
            flushed = channel.flush()
        except ChannelClosedError:
            return  # its end is read next
        if flushed:
            self._loop.want_write(channel, False)


def no_shared_memory(path: str, offset: int, count: int) -> memoryview:
    """In place of ``SharedMemory.read`` where the client is on another machine, and may name no file of this one.

    Raises:
        ProtocolError: always.
    """
    raise ProtocolError("a client of a pool shares no memory with it")


class HeldFile:
    """A file that stays readable, under ``path``, when it is removed: checkpoints are replaced while they are in use."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.path = f"/proc/{os.getpid()}/fd/{descriptor}"

    def __del__(self) -> None:
        os.close(self._descriptor)


def hold_file(path: str) -> HeldFile | None:
    """The file at a path, unless it is none or there are too many."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # which its workers will tell as well
    if descriptor >= _MOST_DESCRIPTORS:
        os.close(descriptor)
        return None
    return HeldFile(descriptor)


class SharedMemory:
    """The client's shared memory, of which the log needs copies.

    They are large, and seldom needed again, so they are put into files without a name, which go with the last use.

    Args:
        directory: where these files are.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._maps: dict[str, memoryview] = {}

    def read(self, path: str, offset: int, count: int) -> memoryview:
        """A copy of a part of it; ``path`` as in MAP.

        Raises:
            OSError, ValueError: there is no such memory, or no space for the copy.
        """
        found = self._maps.get(path)
        if found is None:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = self._maps[path] = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(descriptor)
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.write(found[offset : offset + count])
            file.flush()
            return memoryview(mmap.mmap(file.fileno(), count, access=mmap.ACCESS_READ))
