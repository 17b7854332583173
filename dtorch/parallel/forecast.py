"""What a layout would cost: a model's call is planned, operator by operator, and nothing is run.

The planner decides placements and communication as it would for the real call, so both are exact; times follow from them
by the speeds in ``links``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

from dtorch.client.graph import Graph
from dtorch.core.errors import PlacementError
from dtorch.core.mesh import init_device_mesh
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.core.steps import Step
from dtorch.parallel.describe import Description, describe
from dtorch.parallel.layout import parallelize
from dtorch.parallel.links import Links
from dtorch.planner.plan import Plan
from dtorch.planner.redistribute import step_bytes

_PRODUCTS = frozenset(
    f"aten.{name}" for name in ("linear", "mm", "matmul", "bmm", "addmm", "baddbmm", "_grouped_mm", "mv", "dot")
)


@dataclass
class Cost:
    """Of a layer, a stage, or all.

    Attributes:
        collectives: number of steps by kind.
        bytes: that cross between devices, all together.
        flops: of one device, in products and attention.
        seconds: of one device.
    """

    collectives: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        moves = ", ".join(f"{n} {kind}" for kind, n in sorted(self.collectives.items())) or "no communication"
        return f"{moves}, {self.bytes:,} bytes; {self.flops:,.0f} flops a device"


@dataclass(frozen=True)
class Forecast:
    """A planned call of a module on a layout.

    Attributes:
        layout: axis -> devices, outermost first.
        parameters: their placements and bytes.
        layers: cost by name of the layer (of the longest list of layers); "" for what lies outside of them.
        total: of everything.
        seconds: of the call, stages overlapping where there are micro-batches; at least what it takes to issue it.
        working_bytes: of the largest operator's tensors on one device.
        microbatches: parts in which the batch runs.
    """

    layout: dict[str, int]
    parameters: Description
    layers: dict[str, Cost]
    total: Cost
    seconds: float
    working_bytes: int
    microbatches: int

    @property
    def bytes_per_device(self) -> int:
        """Parameters of the fullest device, and the largest operator's tensors."""
        return max(self.parameters.bytes_by_device.values(), default=0) + self.working_bytes

    def __str__(self) -> str:
        out = [str(self.parameters), "", "communication of a call:"]
        out += [f"  {name or 'outside of the layers'}: {cost}" for name, cost in self.layers.items()]
        return "\n".join([*out, f"  total: {self.total}"])


class _Observer:
    """Adds up what is planned, while it is a session's observer."""

    def __init__(self, links: Links) -> None:
        self.links, self.layer = links, ""
        self.layers: dict[str, Cost] = {"": Cost()}
        self.stages: dict[MeshLayout, float] = {}
        self.working_bytes = self.operators = 0

    def ran(self, plan: Plan, frame: Any) -> None:
        """An operator was planned."""
        self.operators += 1
        held = [s for s in (*plan.wanted, *(r.spec for r in plan.results if not r.same)) if s is not None]
        touched = sum(_local_bytes(s) for s in held)
        views = bool(plan.results) and all(r.alias is not None and not r.same for r in plan.results)
        flops = _flops(plan)
        seconds = 0.0 if views else self.links.operator_s + touched / self.links.memory_bytes_per_s
        self.working_bytes = max(self.working_bytes, 0 if views else touched)
        self._add(plan.mesh, flops, max(seconds, flops / self.links.flops_per_s), plan.steps)

    def moved(self, src: TensorSpec, dst: TensorSpec, steps: Sequence[Step], frame: Any) -> None:
        """A tensor was redistributed."""
        self._add(dst.mesh, 0.0, 0.0, steps)

    def _add(self, mesh: MeshLayout, flops: float, seconds: float, steps: Sequence[Step]) -> None:
        cost = self.layers[self.layer]
        for step in steps:
            moved = step_bytes(step)
            if moved:
                cost.collectives[step.kind] += 1
                cost.bytes += moved
                seconds += self.links.seconds(step.kind, moved / mesh.size)
        cost.flops += flops
        cost.seconds += seconds
        self.stages[mesh] = self.stages.get(mesh, 0.0) + seconds


def _local_bytes(spec: TensorSpec) -> int:
    return prod(spec.local_shape(0)) * spec.dtype.itemsize


def _flops(plan: Plan) -> float:
    """Of the first device, which holds the largest pieces."""
    name, specs = plan.call.name, plan.wanted
    if not plan.results or plan.results[0].spec is None:
        return 0.0
    if "scaled_dot_product" in name and len(specs) > 2:
        *_, _, keys, _ = plan.call.specs[1].shape if specs[1].ndim == 4 else (0, 0, *plan.call.specs[1].shape)
        return 4.0 * prod(specs[0].local_shape(0)) * int(keys)
    if name not in _PRODUCTS:
        return 0.0
    first = specs[1] if name in ("aten.addmm", "aten.baddbmm") else specs[0]
    inner = first.local_shape(0)[-1]
    flops = 2.0 * prod(plan.results[0].spec.local_shape(0)) * inner
    if name == "aten._grouped_mm":  # of the rows each device along ep multiplies those of its own experts
        flops /= prod(n for a, n in enumerate(plan.mesh.shape) if plan.mesh.kind(a) == "ep")
    return flops


def meta_copy(module: nn.Module) -> nn.Module:
    """The module without the values of its parameters and buffers; nothing of them is copied."""
    stand_ins: dict[int, Any] = {}
    for t in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(t, device="meta")
        stand_ins[id(t)] = nn.Parameter(empty, t.requires_grad) if isinstance(t, nn.Parameter) else empty
    return copy.deepcopy(module, stand_ins)


def forecast(
    module: nn.Module,
    layout: dict[str, int],
    batch: int,
    sequence: int,
    *,
    microbatches: int = 1,
    links: Links | None = None,
) -> Forecast:
    """Plan a call of a language model on token ids.

    Args:
        module: not placed yet; its values are not needed, so it may be on the meta device. It stays as it is.
        layout: axis name -> devices.
        batch, sequence: of the ids.
        microbatches: as of ``parallelize``.
        links: speeds; by default what ``dtorch bench-links`` has measured, else assumed.

    Raises:
        PlacementError: the layout cannot work.
    """
    from dtorch.parallel.links import links_file

    links = links or Links.load(links_file())
    planned = meta_copy(module).eval()
    observer = _Observer(links)
    dry = Graph(mode="inline", null_workers=max(prod(layout.values()), 1))
    try:
        with dry, torch.no_grad():
            mesh = init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
            dry.session.layout(mesh)
            parallelize(planned, mesh, microbatches=microbatches)
            _watch_layers(planned, observer)
            dry.session.observer = observer
            options = {"use_cache": False} if hasattr(getattr(planned, "config", None), "use_cache") else {}
            planned(torch.zeros(batch, sequence, dtype=torch.int64), **options)
            parameters = describe(planned)
    finally:
        dry.session.observer = None
        dry.close()
    total = Cost()
    for cost in observer.layers.values():
        total.collectives.update(cost.collectives)
        total.bytes, total.flops, total.seconds = (
            total.bytes + cost.bytes, total.flops + cost.flops, total.seconds + cost.seconds,
        )  # fmt: skip
    stages = list(observer.stages.values())
    parts = microbatches if len(stages) > 1 else 1
    # The first part goes through all stages, the others follow at the pace of the slowest.
    seconds = sum(stages) / parts + (parts - 1) * max(stages, default=0.0) / parts
    seconds = max(seconds, observer.operators * links.issue_s)
    return Forecast(dict(layout), parameters, observer.layers, total, seconds, observer.working_bytes, microbatches)


def _watch_layers(module: nn.Module, observer: _Observer) -> None:
    from dtorch.parallel.pipeline import find_layers

    try:
        layers = find_layers(module)
    except PlacementError:
        return  # all of it counts as outside of layers
    for name, layer in layers.items():
        observer.layers[name] = Cost()
        layer.register_forward_pre_hook(lambda _m, _a, n=name: setattr(observer, "layer", n), prepend=True)
        layer.register_forward_hook(lambda _m, _a, _o: setattr(observer, "layer", ""), always_call=True)
