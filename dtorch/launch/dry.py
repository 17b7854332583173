"""Dry mode: a link to workers that are not there, for planning. Operators are planned and go nowhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dtorch.core.errors import DtorchError
from dtorch.protocol.link import Ack, Event


class DryLink:
    """Accepts everything and runs nothing; every device is there."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()

    def assign(self, devices: Sequence[int]) -> dict[int, int]:
        """Every device lives in worker 0."""
        return dict.fromkeys(devices, 0)

    def send_batch(
        self, seq: int, frames: Sequence[bytes | memoryview], targets: Sequence[int] | None = None, shared: bool = False
    ) -> None:
        """Forget the batch."""
        self._events.append(Ack(seq))

    def receive(self, timeout_s: float | None) -> Event | None:
        """The next event.

        Raises:
            DtorchError: somebody waits for what can never come.
        """
        if self._events:
            return self._events.popleft()
        if timeout_s == 0:
            return None
        raise DtorchError(
            "The program asks for a value, or for a shape that depends on values, while it is only planned: nothing is run, so "
            "there are none. Plan the part before it, or run the program."
        )

    def close(self) -> None:
        """Nothing to end."""
