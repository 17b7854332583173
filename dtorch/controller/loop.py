"""Waits for descriptors and calls who watches them."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Protocol

_READ = select.EPOLLIN
_WRITE = select.EPOLLOUT


class HasFileno(Protocol):
    """Anything with a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


Ready = Callable[[bool, bool], None]
"""Called with: readable or at its end; writable."""


class Loop:
    """An epoll set whose members know what to do."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Ready] = {}

    def watch(self, source: HasFileno, ready: Ready) -> None:
        """Call ``ready`` whenever ``source`` is readable or at its end."""
        self._ready[source.fileno()] = ready
        self._epoll.register(source.fileno(), _READ)

    def want_write(self, source: HasFileno, wanted: bool) -> None:
        """Whether to call when ``source`` is writable as well."""
        if source.fileno() in self._ready:
            self._epoll.modify(source.fileno(), _READ | _WRITE if wanted else _READ)

    def unwatch(self, source: HasFileno) -> None:
        """Call no more; before the descriptor is closed. Idempotent."""
        if self._ready.pop(source.fileno(), None) is not None:
            self._epoll.unregister(source.fileno())

    def step(self, timeout_s: float | None) -> bool:
        """Wait until something is ready, at most ``timeout_s`` (``None``: for ever), and call who watches it.

        Returns:
            Whether anything was.
        """
        found = self._epoll.poll(timeout_s)
        for descriptor, events in found:
            ready = self._ready.get(descriptor)
            if ready is not None:  # not unwatched by an earlier call of this round
                ready(bool(events & ~_WRITE), bool(events & _WRITE))
        return bool(found)
