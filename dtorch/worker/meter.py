"""How much memory the tensors of a worker hold: now, and the most since one began to count.

Counted are those of its store, and those that it makes on the way to a result by sending: moved arguments, and what a
ring's blocks need.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def blocks(values: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of the memory of all tensors in lists of tensors; what several share is there once."""
    return {
        storage.data_ptr(): storage.nbytes()
        for value in values
        if isinstance(value, list)
        for storage in map(torch.Tensor.untyped_storage, value)
    }


def parts(store: Mapping[int, Any]) -> list[list[Any]]:
    """[id, [[number of the memory, its bytes] of each part]] of every tensor; tensors that share memory name the same."""
    numbers: dict[int, int] = {}
    return [
        [number, [[numbers.setdefault(s.data_ptr(), len(numbers)), s.nbytes()] for s in map(torch.Tensor.untyped_storage, v)]]
        for number, v in store.items()
        if isinstance(v, list)
    ]


class Meter:
    """Counts memory by address, as one memory may be held by several.

    Attributes:
        live_bytes, peak_bytes: what is held, and the most that was.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0

    def add(self, held: Mapping[int, int]) -> None:
        """One more holds these blocks."""
        for address, size in held.items():
            holders = self._holders.get(address, 0)
            self._holders[address] = holders + 1
            self.live_bytes += 0 if holders else size

    def drop(self, held: Mapping[int, int]) -> None:
        """One less does."""
        for address, size in held.items():
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address]
                self.live_bytes -= size

    def note(self) -> None:
        """Keep the most that was."""
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class MeteredStore(dict[int, Any]):
    """A store that counts along, with what is on its way to it."""

    def __init__(self, entries: Mapping[int, Any]) -> None:
        super().__init__()
        self.meter = Meter()
        for number, value in entries.items():
            self[number] = value

    def __setitem__(self, number: int, value: Any) -> None:
        before = self.get(number)
        super().__setitem__(number, value)
        self.meter.add(blocks([value]))
        self.meter.drop(blocks([before]))
        self.meter.note()

    def pop(self, number: int, default: Any = None) -> Any:
        """As of any dict; without a default of one's own it is ``None``."""
        value = super().pop(number, default)
        self.meter.drop(blocks([value]))
        return value

    def clear(self) -> None:
        """Forget everything."""
        for value in self.values():
            self.meter.drop(blocks([value]))
        super().clear()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors from now until they are gone, in the store or not."""
        for tensor in tensors:
            held = blocks([[tensor]])
            self.meter.add(held)
            weakref.finalize(tensor, self.meter.drop, held).atexit = False
        self.meter.note()
