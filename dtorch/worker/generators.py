"""Random generators of a worker. Every worker of a mesh draws the same numbers, so each keeps its own copy."""

from __future__ import annotations

import torch


class Generators:
    """Generators by the number the client gave them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, torch.Generator] = {}

    def get(self, number: int) -> torch.Generator:
        """The generator, made with torch's default seed on first use."""
        g = self._made.get(number)
        if g is None:
            g = self._made[number] = torch.Generator(self._device)
        return g

    def seed(self, number: int, seed: int | None) -> None:
        """Start the generator's sequence again from ``seed``; forget the generator when that is ``None``."""
        if seed is None:
            self._made.pop(number, None)
        else:
            self.get(number).manual_seed(seed)

    def states(self) -> dict[int, torch.Tensor]:
        """The states of all generators, on the host, by number."""
        return {number: g.get_state().cpu() for number, g in self._made.items()}

    def set_states(self, states: dict[int, torch.Tensor]) -> None:
        """Continue from what ``states`` returned."""
        for number, state in states.items():
            self.get(number).set_state(state)
