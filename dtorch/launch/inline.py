"""Inline mode: the worker runs inside the client's process, each batch at once. A debugger steps into the operator."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence

from dtorch.core.torch_private import outside_of_dispatch
from dtorch.protocol.link import Ack, Event, Reply, WorkerUp
from dtorch.worker.executor import Executor


class InlineLink:
    """A link to one executor in this process that hosts every device."""

    def __init__(self, physical: str = "cpu", file_roots: Sequence[str] | None = None) -> None:
        self._events: deque[Event] = deque()
        self._executor = Executor([], self._reply, None, 0, physical, file_roots)

    def _reply(self, frames: Sequence[bytes | memoryview]) -> None:
        self._events.append(Reply([bytes(frame) for frame in frames]))  # copies: what they show may be written next

    def assign(self, devices: Sequence[int]) -> dict[int, int]:
        """Every device lives in worker 0."""
        self._executor.devices.extend(devices)
        self._events.append(WorkerUp(0, os.getpid(), socket.gethostname(), tuple(self._executor.devices)))
        return dict.fromkeys(devices, 0)

    def send_batch(
        self, seq: int, frames: Sequence[bytes | memoryview], targets: Sequence[int] | None = None, shared: bool = False
    ) -> None:
        """Run the batch now."""
        with outside_of_dispatch():
            self._executor.run(frames)
        self._events.append(Ack(seq))

    def receive(self, timeout_s: float | None) -> Event | None:
        """The next event; nothing can arrive later, so it never waits."""
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Drop all tensors."""
        self._executor.close()
