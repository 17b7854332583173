"""The cases by name, and the place where one of them runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Results = Sequence[torch.Tensor]
Case = Callable[["Place"], Results]
CASES: dict[str, Case] = {}


def case(f: Case) -> Case:
    """Register a case under its function's name, with dashes."""
    CASES[f.__name__.replace("_", "-")] = f
    return f


class Place:
    """Where a case runs, and the synchronising reads that its denoising steps made there.

    Args:
        device: ``"cpu"`` for plain torch, ``"dtorch"`` for the default mesh.
        count: total number of synchronising reads so far.

    Attributes:
        reads: for each denoising step of a call but the first, reads from the end of the step before it to its own
            end. The first step also pays for what is read once a call.
    """

    def __init__(self, device: str, count: Callable[[], int] = lambda: 0) -> None:
        self.device = device
        self.reads: list[int] = []
        self._count = count
        self._last: int | None = None

    def put(self, movable: Any) -> Any:
        """A pipeline, module or tensor on this device; steps of a pipeline's scheduler are counted from now on."""
        moved = movable.to(self.device)
        if hasattr(moved, "scheduler"):
            self._watch(moved.scheduler)
        return moved

    def step_ended(self) -> None:
        """To be called after every denoising step."""
        now = self._count()
        if self._last is not None:
            self.reads.append(now - self._last)
        self._last = now

    def _watch(self, scheduler: Any) -> None:
        start, step = scheduler.set_timesteps, scheduler.step

        @functools.wraps(start)  # pipelines look at the parameters of both
        def started(*args: Any, **kwargs: Any) -> Any:
            self._last = None
            return start(*args, **kwargs)

        @functools.wraps(step)
        def stepped(*args: Any, **kwargs: Any) -> Any:
            out = step(*args, **kwargs)
            self.step_ended()
            return out

        scheduler.set_timesteps, scheduler.step = started, stepped


def host(value: Any) -> torch.Tensor:
    """A result as a plain tensor."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return value.detach().cpu()  # type: ignore[no-any-return]


def seeded(seed: int = 0) -> torch.Generator:
    """A fresh generator of the CPU, which pipelines take on every device."""
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    """Normal random numbers on the CPU, the same for the same seed and shape."""
    return torch.randn(*shape, generator=seeded(seed))
