"""``dtorch.memory_summary``: which tensors occupy the workers' memory, whose they are, and where they were made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from dtorch.client import graph
from dtorch.client.handle import Handle
from dtorch.client.memory import ask, number_of
from dtorch.client.profile.report import table
from dtorch.client.session import Session
from dtorch.client.sites import describe
from dtorch.protocol import commands as C

_ROWS = 15  # of each table in the text


@dataclass(frozen=True)
class TensorMemory:
    """Memory of one tensor, and of what shares it.

    Attributes:
        name: of a parameter, buffer, gradient or optimizer's state; "" of other tensors.
        module: that has it, "" if none.
        line: ``file:line`` where it was made, "" if it is not known.
        placements: as text.
        bytes: on each device that holds some of it.
    """

    name: str
    module: str
    line: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: str
    bytes: dict[int, int]

    @property
    def total(self) -> int:
        """Bytes on all devices together."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class MemorySummary:
    """What the workers hold for this program.

    Attributes:
        devices: bytes of each device, tensors of which the program knows nothing any more (of saved states) included.
        tensors: the largest first; memory that several share is listed once.
    """

    devices: dict[int, int] = field(default_factory=dict)
    tensors: list[TensorMemory] = field(default_factory=list)

    @property
    def by_module(self) -> dict[str, dict[int, int]]:
        """Bytes of each device by module, "" standing for tensors of none; the largest first."""
        return self._by("module")

    @property
    def by_line(self) -> dict[str, dict[int, int]]:
        """Bytes of each device by the line where tensors were made; the largest first."""
        return self._by("line")

    def _by(self, key: str) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for t in self.tensors:
            row = found.setdefault(getattr(t, key), {})
            for device, size in t.bytes.items():
                row[device] = row.get(device, 0) + size
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def __str__(self) -> str:
        devices = sorted(self.devices)
        head = [*(f"device {d}" for d in devices), "all"]

        def sizes(held: dict[int, int]) -> list[str]:
            return [*(_size(held.get(d, 0)) for d in devices), _size(sum(held.values()))]

        parts = [table([*head, ""], [[*sizes(self.devices), "all tensors"]], left=1)]
        tensors = [
            [*sizes(t.bytes), t.name or "-", f"{t.shape} {t.dtype} {t.placements}", t.line] for t in self.tensors
        ]
        parts.append(_limited([*head, "tensor", "what", "made at"], tensors, left=3))
        for title, found in (("module", self.by_module), ("made at", self.by_line)):
            parts.append(_limited([*head, title], [[*sizes(held), key or "-"] for key, held in found.items()], left=1))
        return "\n\n".join(parts)


def memory_summary(
    device: int | str | torch.device | None = None, *, module: torch.nn.Module | None = None
) -> MemorySummary:
    """Which tensors of the current session occupy its workers, now that all that was asked of them is done.

    Names are those of the parameters and buffers of all modules of the program, of their gradients, and of optimizers'
    states. Looks through all objects of the process, which takes a tenth of a second or more.

    Args:
        device: number of a device, or ``"cpu:1"``: only what that holds; by default all.
        module: take names of this one only.

    Returns:
        The tables, also as text by ``print``.

    Raises:
        DtorchError: no worker hosts the device.
    """
    session = graph.current_session()
    only = None if device is None else number_of(session, device)
    held = {worker: msgpack.unpackb(data) for worker, data in ask(session, C.EACH).items()}
    handles, names = _look(session, module)
    hosts = session._device_worker
    found: dict[int, dict[int, int]] = {}  # tensor -> device -> bytes
    devices: dict[int, int] = {d: 0 for d in sorted(hosts) if only in (None, d)}
    for worker, rows in held.items():
        seen: set[int] = set()
        # What has a name, or else what was made first, answers for memory that several share.
        for number, parts in sorted(rows, key=lambda row: (row[0] not in names, row[0])):
            handle = handles.get(number)
            mesh = () if handle is None else handle.spec.mesh.devices
            here = [d for d in mesh if hosts[d] == worker] or sorted(d for d, w in hosts.items() if w == worker)
            for d, (memory, size) in zip(here, parts, strict=False):
                if memory not in seen:
                    seen.add(memory)
                    if d in devices:
                        devices[d] += size
                        found.setdefault(number, {})[d] = size
    tensors = [
        _row(handles[number], names.get(number, ("", "")), sizes)
        for number, sizes in found.items()
        if number in handles
    ]
    return MemorySummary(devices, sorted(tensors, key=lambda t: -t.total))


def _row(handle: Handle, name: tuple[str, str], sizes: dict[int, int]) -> TensorMemory:
    spec = handle.spec
    line = "" if handle.site is None else describe(handle.site)
    return TensorMemory(*name, line, tuple(spec.shape), spec.dtype, str(list(spec.placements)), sizes)


def _look(
    session: Session, module: torch.nn.Module | None
) -> tuple[dict[int, Handle], dict[int, tuple[str, str]]]:  # fmt: skip
    """The session's handles by id, and (name, module) of those that have one."""
    handles: dict[int, Handle] = {}
    modules: dict[int, torch.nn.Module] = {} if module is None else {id(module): module}
    optimizers: list[torch.optim.Optimizer] = []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is Handle:
            if thing.session is session:
                handles[thing.id] = thing
        elif issubclass(kind, torch.nn.Module):
            if module is None:
                modules[id(thing)] = thing
        elif issubclass(kind, torch.optim.Optimizer):
            optimizers.append(thing)
    inner = {id(child) for m in modules.values() for child in m.children()}
    names: dict[int, tuple[str, str]] = {}
    for root in (m for key, m in modules.items() if key not in inner):
        for name, owner, t in _tensors_of(root):
            for number, suffix in ((_id_of(t), ""), (_id_of(t.grad) if t.is_leaf else None, ".grad")):
                if number is not None:
                    names.setdefault(number, (name + suffix, owner))
    for optimizer in optimizers:
        for t, state in optimizer.state.items():
            name, owner = names.get(_id_of(t) or 0, ("", ""))
            for key, value in state.items():
                number = _id_of(value)
                if number is not None:
                    names.setdefault(number, (f"{type(optimizer).__name__} {key} of {name}", owner))
    return handles, names


def _tensors_of(root: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, module and value of every parameter and buffer."""
    kind = type(root).__name__
    for path, module in root.named_modules():
        owner = f"{kind}.{path}" if path else kind
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield f"{owner}.{name}", owner, t


def _id_of(value: Any) -> int | None:
    handle = getattr(value, "_h", None) if isinstance(value, torch.Tensor) else None
    return handle.id if isinstance(handle, Handle) else None


def _limited(head: list[str], rows: list[list[str]], left: int) -> str:
    more = f"\n({len(rows) - _ROWS} more)" if len(rows) > _ROWS else ""
    return table(head, rows[:_ROWS], left) + more


def _size(count: int) -> str:
    """Bytes for people."""
    if count < 10_000:
        return f"{count} B"
    for unit in ("KiB", "MiB"):
        count_in = count / (1 << 10 if unit == "KiB" else 1 << 20)
        if count_in < 10_000:
            return f"{count_in:.1f} {unit}"
    return f"{count / (1 << 30):.1f} GiB"
