"""``TensorFuture``: a value on its way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import torch

from dtorch.client.wrap import Pending


class TensorFuture:
    """The value of a distributed tensor as it was when asked for; several may be under way at once."""

    def __init__(self, t: Any) -> None:
        self._pending: Pending | None = Pending(t)
        self._value: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """Wait for the value, a plain CPU tensor.

        Raises:
            RemoteError: an operator it depends on failed.
        """
        if self._value is None:
            assert self._pending is not None
            self._value = self._pending.get()
            self._pending = None
        return self._value

    def wait(self) -> None:
        """Wait until the value is here."""
        self.get()

    def wait_for(self, ms: float) -> bool:
        """Wait at most ``ms`` milliseconds; whether the value is here."""
        if self._pending is None:
            return True
        return self._pending.session.wait(self._pending.request, ms / 1000)

    def is_ready(self) -> bool:
        """Whether the value is here; does not wait."""
        return self.wait_for(0.0)

    def __await__(self) -> Generator[Any, None, torch.Tensor]:
        if self._pending is not None and not self._pending.request.done:
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()

            def wake() -> None:
                if not arrived.done():
                    arrived.set_result(None)

            request = self._pending.request
            request.callbacks.append(lambda: _call_soon(loop, wake))
            if request.done:  # it came between the check and the registration
                wake()
            yield from arrived.__await__()
        return self.get()


def _call_soon(loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(wake)
