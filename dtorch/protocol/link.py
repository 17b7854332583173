"""What a session needs of the connection to its workers, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ack:
    """All live workers have run every batch up to ``seq``."""

    seq: int


@dataclass(frozen=True)
class Reply:
    """Frames from a worker, see ``protocol.commands``."""

    frames: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class WorkerUp:
    """A worker is ready."""

    index: int
    pid: int
    host: str
    devices: tuple[int, ...]
    state: str = "ready"


@dataclass(frozen=True)
class WorkerLost:
    """A worker has ended, and is not replaced."""

    index: int
    pid: int
    devices: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Restarting:
    """A worker has ended; all start again, and repeat what is needed. ``WorkerUp`` follows for each."""

    index: int
    pid: int
    devices: tuple[int, ...]
    reason: str


Event = Ack | Reply | WorkerUp | WorkerLost | Restarting


class Link(Protocol):
    """One session's connection. Used by one thread at a time."""

    def assign(self, devices: Sequence[int]) -> dict[int, int]:
        """Worker of each of these new devices; starts workers as needed. Batches sent later reach them."""

    def send_batch(
        self, seq: int, frames: Sequence[bytes | memoryview], targets: Sequence[int] | None = None, shared: bool = False
    ) -> None:
        """Send a batch to every worker, or to the targets; ``shared``: it names memory of this process."""

    def receive(self, timeout_s: float | None) -> Event | None:
        """The next event; ``None`` when none arrives in time (0: at once; ``None``: wait)."""

    def close(self) -> None:
        """End the workers. Idempotent."""
