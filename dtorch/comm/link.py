"""The client's connection to its controller, whatever carries it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dtorch.comm.channel import Buffer, Frame


class Link(Protocol):
    """One session's connection: messages out, messages in, workers on request.

    Frame 0 of a message is a header made by ``dtorch.protocol.codec``; the frames after it are opaque payload. A link
    is used by one thread at a time, not always the same one.
    """

    def send(self, message: Sequence[Buffer]) -> None:
        """Send one message; the buffers may be changed as soon as this returns.

        Raises:
            CommError: the controller has ended; the text says how.
            SessionClosedError: the link was closed, or this process is a fork of the one that opened it.
        """

    def receive(self, timeout_s: float | None) -> list[Frame] | None:
        """The next message from the controller, or ``None`` when none comes within ``timeout_s`` (``None``: wait).

        Raises:
            CommError, SessionClosedError: as ``send``, after the messages that arrived before.
        """

    def add_worker(self, devices: Sequence[int], threads: int, env: dict[str, str]) -> None:
        """Ask for one more worker; does not wait for it.

        Workers are numbered from 0 in the order of these calls. Messages sent afterwards reach it, in order.

        Args:
            devices: the numbers of the devices that it hosts.
            threads: the size of its torch thread pool.
            env: environment variables that it sets before anything else.
        """

    def close(self, timeout_s: float = 5.0) -> None:
        """End the session's processes, and wait until they have ended; work that has not run is dropped. Idempotent."""

    def fileno(self) -> int:
        """A descriptor that turns readable when ``receive`` may have something. Level-triggered.

        Messages that have been read together with an earlier one do not show on it, so after a wake-up call
        ``receive(0)`` until it returns ``None``.
        """
