"""The controller's I/O: connections to events, instructions to connections. What to do is decided in ``state.py``."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dtorch.comm.channel import Buffer, Channel, ChannelClosedError, Frame, pack
from dtorch.controller.loop import Loop
from dtorch.controller.spawner import NullSpawner, Spawner, TemplateSpawner
from dtorch.controller.state import (
    ControllerState,
    Instruction,
    KillWorker,
    PassToClient,
    PassToWorkers,
    StartWorker,
    StopAll,
    ToClient,
)
from dtorch.core.errors import CommError, ProtocolError
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import AddWorker, Exited, Fault, Forked

_STOP_MARGIN_S = 0.5
"""What the template gets, after the workers' grace, to end them by force and itself."""


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
    """

    client_fd: int
    census_fd: int
    session_dir: str
    executor: str
    physical: str
    null_workers: int = 0

    @property
    def peers_dir(self) -> str:
        """Where workers meet to form process groups."""
        return f"{self.session_dir}/peers"


class Server:
    """Serves one client until it says so or is gone."""

    def __init__(self, config: ControllerConfig, client: Channel, state: ControllerState) -> None:
        self._client, self._state = client, state
        self._loop = Loop()
        self._workers: dict[int, Channel] = {}
        self._stop_at: float | None = None
        self._loop.watch(client, self._on_client)
        self._spawner = self._make_spawner(config)

    def run(self) -> None:
        """Serve; returns when all workers have ended."""
        while not self._spawner.stopped or self._stop_at is None:
            timeout_s = None if self._stop_at is None else self._stop_at - time.monotonic()
            if timeout_s is not None and timeout_s <= 0:
                self._spawner.abandon()
            else:
                self._loop.step(timeout_s)

    def _make_spawner(self, config: ControllerConfig) -> Spawner:
        if config.null_workers:
            connections = [self._connect(self._state.add_worker((i,))) for i in range(config.null_workers)]
            return NullSpawner(self._on_report, connections, config.census_fd)
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
            self._spawner.kill(index)  # it is ending, or has lost its mind; how it ended is reported next

    def _take(self, index: int, channel: Channel) -> None:
        """Handle what has been read from a worker."""
        while (frames := channel.take()) is not None:
            self._perform(self._state.worker_sent(index, decode(frames[0]), frames))

    def _on_report(self, report: Forked | Exited) -> None:
        if isinstance(report, Forked):
            self._state.worker_forked(report.index, report.pid)
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
        for instruction in instructions:
            if isinstance(instruction, PassToWorkers):
                pieces = pack(instruction.frames)
                for index in instruction.indexes:
                    self._post(self._workers[index], pieces)
            elif isinstance(instruction, ToClient):
                self._post(self._client, pack([encode(instruction.message)]))
            elif isinstance(instruction, PassToClient):
                self._post(self._client, pack(instruction.frames))
            elif isinstance(instruction, StartWorker):
                self._start(instruction.index, instruction.request)
            elif isinstance(instruction, KillWorker):
                self._spawner.kill(instruction.index)
            elif isinstance(instruction, StopAll):
                self._stop(instruction.grace_ms)

    def _start(self, index: int, request: AddWorker) -> None:
        try:
            connection = self._connect(index)
        except OSError as error:
            self._perform(self._state.worker_ended(index, f"the controller has no more descriptors: {error}"))
            return
        self._spawner.start(index, request, connection)

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
