"""Local and cluster mode: a session's link to workers that are other processes."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from dtorch.comm.channel import Frame
from dtorch.core.config import SessionConfig, cores
from dtorch.core.errors import DtorchError
from dtorch.launch.cluster import PoolLink
from dtorch.launch.local import LaunchConfig, LocalLink
from dtorch.protocol import messages as M
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.link import Ack, Event, Reply, Restarting, WorkerLost, WorkerUp

# Threads of a worker that wait for work must not spin: client, controller and workers share the cores.
_WORKER_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


class ProcessLink:
    """Assigns devices to worker processes and turns control messages into the session's events.

    Workers are started as devices are named, up to the configured number; further devices share them in blocks, so
    that neighbours on the innermost mesh axis tend to live together.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._config = config
        self._count = 0
        self._shared = 0
        if config.mode == "cluster":
            pool = PoolLink(config)
            self._link: LocalLink = pool
            self._most = min(config.workers or pool.workers, pool.workers)
            return
        self._most = config.workers or cores()
        roots = {} if config.file_roots is None else {"DTORCH_FILE_ROOTS": os.pathsep.join(config.file_roots)}
        self._link = LocalLink(
            LaunchConfig(
                physical=config.device_type,
                env={**_WORKER_ENV, **roots},
                null_workers=config.null_workers,
                restarts=0 if config.null_workers else config.restarts,
                log_operators=config.log_operators,
                log_bytes=config.log_bytes,
            )
        )

    def assign(self, devices: Sequence[int]) -> dict[int, int]:
        """Worker of each new device."""
        if self._config.null_workers:
            if max(devices) >= self._config.null_workers:
                raise DtorchError(f"Device {max(devices)} of {self._config.null_workers} null workers.")
            return {d: d for d in devices}
        new = min(len(devices), self._most - self._count)
        if not new:
            first, self._shared = self._shared, self._shared + len(devices)
            return {d: (first + i) % self._most for i, d in enumerate(devices)}
        # Never more than the program itself computes with (OMP_NUM_THREADS, torch.set_num_threads): it gets its own bits.
        threads = self._config.threads or max(1, min(torch.get_num_threads(), cores() // (self._count + new)))
        found: dict[int, int] = {}
        for k in range(new):
            block = devices[k * len(devices) // new : (k + 1) * len(devices) // new]
            self._link.add_worker(list(block), threads, {"OMP_NUM_THREADS": str(threads)})
            found.update(dict.fromkeys(block, self._count))
            self._count += 1
        return found

    def send_batch(
        self, seq: int, frames: Sequence[bytes | memoryview], targets: Sequence[int] | None = None, shared: bool = False
    ) -> None:
        """Send a batch to every worker, or to the targets; ``shared``: it names memory of this process."""
        self._link.send([encode(M.Batch(seq, None if targets is None else tuple(targets), int(shared))), *frames])

    def receive(self, timeout_s: float | None) -> Event | None:
        """The next event."""
        while (frames := self._link.receive(timeout_s)) is not None:
            event = self._event(frames)
            if event is not None:
                return event
        return None

    def _event(self, frames: list[Frame]) -> Event | None:
        message = decode(frames[0])
        if isinstance(message, M.Ack):
            return Ack(message.seq)
        if isinstance(message, M.Reply):
            return Reply([memoryview(f) for f in frames[1:]])
        if isinstance(message, M.WorkerUp):
            return WorkerUp(message.index, message.pid, message.host, message.devices)
        if isinstance(message, M.Restarting):
            return Restarting(message.index, message.pid, message.devices, message.reason)
        if isinstance(message, M.WorkerLost):
            return WorkerLost(message.index, message.pid, message.devices, message.reason)
        if isinstance(message, M.Fault):
            return WorkerLost(-1 if message.index is None else message.index, 0, (), message.text)
        return None

    def close(self) -> None:
        """End controller and workers."""
        self._link.close()
