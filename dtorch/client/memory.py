"""What the tensors of a session occupy on its workers, as the workers count it."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import torch

from dtorch.client import graph
from dtorch.client.session import Session
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
    session = graph.current_session()
    found = []
    for worker, data in sorted(ask(session, C.HELD).items()):
        live, peak = msgpack.unpackb(data)
        found.append(MemoryStats(worker, tuple(session.workers[worker].devices), live, peak))
    if device is None:
        return found
    number = number_of(session, device)
    return [s for s in found if number in s.devices]


def reset_peak_memory_stats() -> None:
    """Begin to count the peak anew. From the first call on workers count along, which costs them some time an operator."""
    ask(graph.current_session(), C.ANEW)


def empty_cache() -> int:
    """Let all workers of the current session give memory that no tensor uses back to the system.

    Returns:
        Bytes, as far as they are known: on a CPU the blocks kept for later uploads, not what the heap gives back.
    """
    return sum(msgpack.unpackb(data)[0] for data in ask(graph.current_session(), C.SPARE).values())


def number_of(session: Session, device: int | str | torch.device) -> int:
    """The number of a device that some worker of the session hosts.

    Raises:
        DtorchError: none does.
    """
    number = device if isinstance(device, int) else torch.device(device).index
    known = sorted(d for worker in session.workers.values() for d in worker.devices)
    if number not in known:
        raise DtorchError(f"No worker hosts device {device!r}: there are {known}.")
    return int(number)


def ask(session: Session, what: int) -> dict[int, memoryview]:
    """The answer of each worker to MEMORY, when it has done what was asked of it so far."""
    session.synchronize()
    if not session.worker_count:
        return {}
    number, request = session.request(session.worker_count)
    with session.lock:
        session.buf.extend((C.MEMORY, number, what))
    session.flush()
    session.finish(request)
    return dict(request.parts)
