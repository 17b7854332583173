"""What the tensors of a session occupy on its workers, as the workers count it."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import torch

from dtorch.client import graph
from dtorch.core.errors import DtorchError
from dtorch.protocol import commands as C


@dataclass(frozen=True)
class MemoryStats:
    """Memory of one worker's tensors. What an operator needs while it runs is not in it.

    Attributes:
        worker: number of the worker.
        devices: the devices it hosts.
        live_bytes: what its tensors hold now; memory that several share counts once.
        peak_bytes: the most since ``reset_peak_memory_stats``; ``None`` before the first call of that.
    """

    worker: int
    devices: tuple[int, ...]
    live_bytes: int
    peak_bytes: int | None


def memory_stats(device: int | str | torch.device | None = None) -> list[MemoryStats]:
    """Memory of the workers of the current session; waits until they have done what was asked of them so far.

    Args:
        device: number of a device, or ``"cpu:1"``: of the worker that hosts it; by default of all.

    Raises:
        DtorchError: no worker hosts the device.
    """
    found = _ask(reset=False)
    if device is None:
        return found
    number = device if isinstance(device, int) else torch.device(device).index
    mine = [s for s in found if number in s.devices]
    if not mine:
        raise DtorchError(f"No worker hosts device {device!r}: there are {sorted(d for s in found for d in s.devices)}.")
    return mine


def reset_peak_memory_stats() -> None:
    """Begin to count the peak anew. From the first call on workers count along, which costs them some time an operator."""
    _ask(reset=True)


def _ask(reset: bool) -> list[MemoryStats]:
    session = graph.current_session()
    session.synchronize()
    if not session.worker_count:
        return []
    number, request = session.request(session.worker_count)
    with session.lock:
        session.buf.extend((C.MEMORY, number, reset))
    session.flush()
    session.finish(request)
    found = []
    for worker, data in sorted(request.parts.items()):
        live, peak = msgpack.unpackb(data)
        found.append(MemoryStats(worker, tuple(session.workers[worker].devices), live, peak))
    return found
