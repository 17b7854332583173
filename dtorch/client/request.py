"""What the client waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtorch.client.shared import Segment
from dtorch.core.errors import DtorchError


class Request:
    """Something the client waits for: complete when every expected worker has answered."""

    __slots__ = ("callbacks", "done", "error", "expected", "lost", "meta", "parts", "refusals", "segment")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.parts: dict[int, memoryview] = {}
        self.meta: Any = None
        self.refusals: list[list[str]] = []
        self.error: DtorchError | None = None
        self.lost: list[Any] | None = None  # serial of the failed operator, and what the worker knows of it
        self.done = False
        self.callbacks: list[Callable[[], None]] = []
        self.segment: Segment | None = None  # workers write to it until they have answered, whoever still waits
