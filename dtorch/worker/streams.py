"""Streams of a CUDA worker: redistributions run beside computation and are awaited where their result is first used.

On a CPU there is one stream of work, and all of this is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Arriving(list[torch.Tensor]):
    """Local tensors that the communication stream is still writing; taking one makes the computation wait for them."""

    def __init__(self, tensors: Sequence[torch.Tensor], event: torch.cuda.Event) -> None:
        super().__init__(tensors)
        self._event: torch.cuda.Event | None = event

    def _arrive(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None

    def __getitem__(self, index: Any) -> Any:
        self._arrive()
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self._arrive()
        return super().__iter__()


class Streams:
    """The computing stream (torch's current one) and the communication stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._communication = torch.cuda.Stream(device) if device.type == "cuda" else None

    def communicate(
        self, run: Callable[[list[torch.Tensor]], list[torch.Tensor]], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a redistribution of tensors; its result may be taken at once, and is waited for when it is."""
        stream = self._communication
        if stream is None:
            return run(tensors)
        inputs = list(tensors)  # waits for what still arrives
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results = run(inputs)
            event = stream.record_event()
        for t in (*inputs, *results):
            # The allocator must not hand memory out again while either stream still uses it.
            t.record_stream(stream)
            t.record_stream(torch.cuda.current_stream())
        return Arriving(results, event)


def device_of(physical: str, devices: Sequence[int]) -> torch.device:
    """The torch device of a worker: on CUDA the one with its first device's number, as far as there are that many."""
    if physical != "cuda":
        return torch.device(physical)
    count = torch.cuda.device_count()
    if not count:
        raise RuntimeError("This worker was asked to compute on CUDA, and torch finds no CUDA device here.")
    device = torch.device("cuda", (devices[0] if devices else 0) % count)
    torch.cuda.set_device(device)
    return device
