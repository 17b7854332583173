"""``dtorch.suggest``: layouts of a model on so many devices, the fastest by the cost model first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from dtorch.core.errors import DtorchError, PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.parallel.experts import find_experts
from dtorch.parallel.forecast import Forecast, forecast, meta_copy
from dtorch.parallel.links import Links, links_file
from dtorch.parallel.pipeline import find_layers

AXES = ("dp", "ep", "pp", "ulysses_cp", "ring_cp", "tp")
# Layouts with more axes than this are never better on the few devices for which all layouts can be tried.
_MOST_AXES = 3
_MOST_PARTS = 4


@dataclass(frozen=True)
class Suggestion:
    """A layout, what it would cost, and why it stands where it stands.

    Attributes:
        layout: axis -> devices; empty for one device.
        microbatches: to be given to ``parallelize``.
        forecast: the planned call.
        fits: whether it fits in the memory of a device.
        reason: in words.
    """

    layout: dict[str, int]
    microbatches: int
    forecast: Forecast
    fits: bool
    reason: str

    def __str__(self) -> str:
        name = ",".join(f"{axis}={n}" for axis, n in self.layout.items())
        parts = f" in {self.microbatches} micro-batches" if self.microbatches > 1 else ""
        cost = f"{self.forecast.seconds * 1e3:.3g} ms, {self.forecast.bytes_per_device:,} bytes a device"
        return f"{name}{parts}: {cost}; {self.reason}"


def suggest(
    model: nn.Module,
    devices: int,
    batch: int,
    sequence: int,
    memory_per_device: int | None = None,
    *,
    links: Links | None = None,
) -> list[Suggestion]:
    """Layouts for one forward call, those that fit in memory first, then by predicted time.

    Args:
        model: a language model, not placed yet; its values are not needed (it may be on the meta device).
        devices: all of them are used.
        batch, sequence: of the token ids.
        memory_per_device: bytes; by default there is no limit.
        links: speeds; by default what ``dtorch bench-links`` has measured, else assumed.

    Raises:
        DtorchError: no layout works, with the reason of each.
    """
    links = links or Links.load(links_file())
    bare, found, refused = meta_copy(model), list[tuple[Forecast, int]](), list[str]()
    for layout in _layouts(bare, devices, batch, sequence):
        parts = _parts(layout, batch)
        try:
            found.append((forecast(bare, layout, batch, sequence, microbatches=parts, links=links), parts))
        except (PlacementError, RuntimeError, ValueError) as e:
            refused.append(f"{layout}: {e}")
    if not found:
        raise DtorchError(f"No layout of {devices} devices works: {'; '.join(refused) or 'batch and sequence are too small'}")
    out = []
    for planned, parts in found:
        fits = memory_per_device is None or planned.bytes_per_device <= memory_per_device
        out.append(Suggestion(planned.layout, parts, planned, fits, _reason(planned, links, memory_per_device)))
    # Of those that the client cannot issue any faster, the one that keeps its devices busy for less.
    cost = [(s.forecast.seconds, s.forecast.total.seconds) if s.fits else (s.forecast.bytes_per_device, 0.0) for s in out]
    return [s for _, s in sorted(zip(cost, out, strict=True), key=lambda entry: (not entry[1].fits, entry[0]))]


def best_mesh(model: nn.Module, mesh: DeviceMesh, batch: int, sequence: int) -> tuple[DeviceMesh, int]:
    """The devices of a mesh in the first layout that ``suggest`` has for them, and its number of micro-batches.

    Raises:
        DtorchError: as ``suggest``.
    """
    first = suggest(model, mesh.size(), batch, sequence)[0]
    grid = mesh.mesh.reshape(tuple(first.layout.values()))
    return DeviceMesh(mesh.device_type, grid, mesh_dim_names=tuple(first.layout), graph=mesh._graph), first.microbatches


def _reason(planned: Forecast, links: Links, memory: int | None) -> str:
    total = planned.total
    talk = sum(links.seconds(k, total.bytes / sum(total.collectives.values()) / prod(planned.layout.values())) * n
               for k, n in total.collectives.items())  # fmt: skip
    share = min(talk / total.seconds, 1.0) if total.seconds else 0.0
    moves = ", ".join(f"{n} {kind}" for kind, n in sorted(total.collectives.items()))
    text = f"{moves}: {share:.0%} of its time" if moves else "no communication"
    if memory is not None and planned.bytes_per_device > memory:
        text = f"needs {planned.bytes_per_device:,} of {memory:,} bytes; {text}"
    return text


def _parts(layout: dict[str, int], batch: int) -> int:
    """Micro-batches that keep the stages of ``pp`` busy, as many as the batch has rows for."""
    rows = batch // (layout.get("dp", 1) * layout.get("ep", 1))
    return max(1, min(rows, _MOST_PARTS * (layout.get("pp", 1) > 1)))


def _layouts(model: nn.Module, devices: int, batch: int, sequence: int) -> Iterator[dict[str, int]]:
    """Factorisations of the devices that give every device something to do."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = int(getattr(text, "num_attention_heads", 0) or devices)
    experts = min((int(part.num_experts) for part in find_experts(model).values()), default=1)  # type: ignore[arg-type]
    try:
        layers = len(find_layers(model))
    except PlacementError:
        layers = 1
    most = {"dp": batch, "ep": experts, "pp": layers, "ulysses_cp": heads, "ring_cp": sequence, "tp": heads}
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    for chosen in itertools.product(sizes, repeat=len(AXES)):
        layout = {axis: n for axis, n in zip(AXES, chosen, strict=True) if n > 1}
        if prod(chosen) != devices or len(layout) > _MOST_AXES or any(n > most[axis] for axis, n in layout.items()):
            continue
        rows, columns = layout.get("dp", 1) * layout.get("ep", 1), layout.get("ulysses_cp", 1) * layout.get("ring_cp", 1)
        whole_heads = heads % (layout.get("tp", 1) * layout.get("ulysses_cp", 1)) == 0
        if rows <= batch and columns <= sequence and whole_heads and experts % layout.get("ep", 1) == 0:
            yield layout or {"dp": 1}
