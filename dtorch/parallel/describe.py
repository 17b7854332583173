"""``dtorch.describe``: a module's parameters, placements and bytes on each device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dtorch.client.tensor import DTensor

# Where ``parallelize`` leaves, in a module, what a user should know of its layout.
NOTES = "_dtorch_layout_notes"


@dataclass(frozen=True)
class Row:
    """One parameter or buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: str
    bytes_by_device: dict[int, int]


@dataclass(frozen=True)
class Description:
    """All rows, and sentences on what the table does not show; ``str()`` of it is the table with them."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def bytes_by_device(self) -> dict[int, int]:
        """Device number -> bytes of all parameters and buffers there."""
        total: dict[int, int] = {}
        for row in self.rows:
            for device, n in row.bytes_by_device.items():
                total[device] = total.get(device, 0) + n
        return dict(sorted(total.items()))

    def __str__(self) -> str:
        width = max([len(r.name) for r in self.rows] + [9])
        out = [f"{'parameter':{width}s}  {'shape':18s} {'dtype':9s} {'bytes a device':>16s}  placements"]
        for r in self.rows:
            most = max(r.bytes_by_device.values(), default=0)
            dtype = str(r.dtype).removeprefix("torch.")
            out.append(f"{r.name:{width}s}  {r.shape!s:18s} {dtype:9s} {most:16,d}  {r.placements}")
        out.append("bytes by device: " + ", ".join(f"{d}: {n:,}" for d, n in self.bytes_by_device.items()))
        return "\n".join([*out, *self.notes])


def describe(module: nn.Module) -> Description:
    """Where each parameter and buffer of a module lies. Nothing is communicated."""
    rows, seen = [], set()
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        if id(t) in seen:
            continue
        seen.add(id(t))
        if isinstance(t, DTensor):
            spec = t._h.spec
            held = {}
            for position, device in enumerate(spec.mesh.devices):
                n = spec.dtype.itemsize
                for size in spec.local_shape(position):
                    n *= size
                held[device] = n
            where = f"{list(t.placements)} on {t.device_mesh}"
        else:
            held, where = {}, f"plain, on {t.device}"
        rows.append(Row(name, tuple(t.shape), t.dtype, where, held))
    return Description(tuple(rows), module.__dict__.get(NOTES, ()))
