"""``RandomState``: everything that a program draws random numbers from by default, as one object of a state."""

from __future__ import annotations

import random as python_random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from dtorch.client import graph, random


class RandomState:
    """The default generators of Python, NumPy (when imported), torch and the current session's devices.

    ``dtorch.save({"random": dtorch.RandomState(), ...}, ...)`` keeps their states, and ``dtorch.load(...,
    into={"random": dtorch.RandomState(), ...})`` continues from them. A generator of its own is put into a state itself.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states; that of the devices is a distributed tensor when they have drawn. Does not wait."""
        found: dict[str, Any] = {
            "python": python_random.getstate(),
            "torch": torch.get_rng_state(),
            "devices": random.state_tensor(random.streams(graph.current_session()).default),
        }
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["numpy"] = numpy.random.get_state()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` returned; waits for the devices' state."""
        python_random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        random.set_state(random.streams(graph.current_session()).default, state["devices"])
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
