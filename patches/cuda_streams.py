"""Streams and events of ``torch.cuda``: a session is one stream, and what is issued first is done first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from .base import Patch, Replacement
from .cuda_devices import SHOWN, meant
from .cuda_runtime import replace_all


def _synchronize() -> None:
    torch.get_device_module("dtorch").synchronize()


class Event:
    """``torch.cuda.Event``. With ``enable_timing``, recording waits for the work issued so far: times are true."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._timed = enable_timing
        self._at: float | None = None  # seconds

    def record(self, stream: Any = None) -> None:
        """Mark this point of the program."""
        if self._timed:
            _synchronize()
            self._at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to a later one.

        Raises:
            RuntimeError: one of the two has not been recorded, or was made without ``enable_timing=True``.
        """
        if self._at is None or end_event._at is None:
            raise RuntimeError(
                "Both events must be created with enable_timing=True and recorded before elapsed_time()."
            )
        return (end_event._at - self._at) * 1000

    def query(self) -> bool:
        """Whether what came before is done; from here it is, since every later use of it comes later."""
        return True

    def synchronize(self) -> None:
        """Wait for what came before."""
        if not self._timed:
            _synchronize()

    def wait(self, stream: Any = None) -> None:
        """Work issued from here on comes after what came before, as always."""


class Stream:
    """``torch.cuda.Stream``: all are the same one."""

    device = SHOWN
    device_index = 0
    device_type = 1  # of CUDA in torch's numbering
    stream_id = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        meant(device)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)

    def query(self) -> bool:
        """Whether it has nothing left to do; asking waits until it has not."""
        _synchronize()
        return True

    def synchronize(self) -> None:
        """Wait for all that was issued."""
        _synchronize()

    def record_event(self, event: Any = None) -> Any:
        """Record an event, by default a new one."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """What is issued later is done later anyway."""

    def wait_stream(self, stream: Any) -> None:
        """There is no other stream."""


_THE_STREAM = Stream()


def _current_stream(device: Any = None) -> Stream:
    meant(device)
    return _THE_STREAM


def _within(stream: Any) -> Any:
    """``with torch.cuda.stream(s):``."""
    return contextlib.nullcontext(stream)


def _replacements() -> Iterator[Replacement]:
    values = {
        "Stream": Stream, "ExternalStream": Stream, "Event": Event, "StreamContext": _within, "stream": _within,
        "current_stream": _current_stream, "default_stream": _current_stream, "set_stream": lambda stream: None,
    }  # fmt: skip
    yield from replace_all(torch.cuda, values)
    yield from replace_all(torch.cuda.streams, {name: values[name] for name in ("Stream", "ExternalStream", "Event")})


CUDA_STREAMS = Patch(
    name="cuda-streams",
    library="torch",
    versions=((2, 13), (2, 14)),
    reason="torch.cuda.Stream and Event cannot be made without a CUDA device",
    replacements=_replacements,
)
