"""How much memory the tensors of a worker's store hold: now, and the most since one began to count."""

from __future__ import annotations

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


class MeteredStore(dict[int, Any]):
    """A store that counts along.

    Attributes:
        live_bytes, peak_bytes: what its tensors hold, and the most that they did.
    """

    def __init__(self, entries: Mapping[int, Any]) -> None:
        super().__init__()
        self._users: dict[int, int] = {}
        self.live_bytes = self.peak_bytes = 0
        for number, value in entries.items():
            self[number] = value

    def __setitem__(self, number: int, value: Any) -> None:
        before = self.get(number)
        super().__setitem__(number, value)
        for address, size in blocks([value]).items():
            users = self._users.get(address, 0)
            self._users[address] = users + 1
            self.live_bytes += 0 if users else size
        self._drop(before)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def pop(self, number: int, default: Any = None) -> Any:
        """As of any dict; without a default of one's own it is ``None``."""
        value = super().pop(number, default)
        self._drop(value)
        return value

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._users.clear()
        self.live_bytes = 0

    def _drop(self, value: Any) -> None:
        for address, size in blocks([value]).items():
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self.live_bytes -= size
