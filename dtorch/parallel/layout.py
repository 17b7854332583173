"""``dtorch.parallelize``: from a mesh with named axes to a placed module."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.parallel.axes import axes
from dtorch.parallel.between import cut_between
from dtorch.parallel.describe import NOTES
from dtorch.parallel.experts import check_experts, find_experts, on_own_experts
from dtorch.parallel.heads import between_heads
from dtorch.parallel.images import is_autoencoder, parallelize_decoder
from dtorch.parallel.inputs import cut_inputs
from dtorch.parallel.microbatches import in_micro_batches
from dtorch.parallel.pipeline import Carrier, find_layers, move_inputs, share_parameters, stage_of_layers
from dtorch.parallel.place import place
from dtorch.parallel.plans import check_plan, cuts, wants_sequence_parallel
from dtorch.parallel.sequences import cut_sequences
from dtorch.parallel.zero import shard_states


def parallelize(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: str | Mapping[str, Any] = "auto",
    *,
    sequence_parallel: bool = False,
    zero: int = 0,
    microbatches: int = 1,
    chunks: int = 1,
    workload: tuple[int, int] = (8, 512),
) -> nn.Module:
    """Place a module on a mesh; its code does not change, and it is called as before.

    Axes of the mesh by name, each size 1 means off: ``dp`` cuts the batch of the inputs, ``tp`` the layers, ``pp``
    the list of layers, ``ulysses_cp`` and ``ring_cp`` the sequence of the inputs, ``ep`` the experts (and the batch, for
    everything else).

    An autoencoder of images is whole on every device, and its decoder cuts images: see ``dtorch.parallel.images``.

    Args:
        module: changed in place, and returned.
        mesh: with ``mesh_dim_names``.
        plan: ``"auto"``: the model's own tensor-parallel plan, or one found for it; or a dict of patterns of module
            names (``*`` matches one part) to styles such as ``"colwise"`` and ``"rowwise"``; or ``"best"``: the first
            layout that ``dtorch.suggest`` has for the devices of the mesh, in place of its axes.
        sequence_parallel: cut activations between the tensor-parallel blocks along the sequence, by ``tp``; so does a
            plan with a ``SequenceParallel``.
        zero: 0, 1, 2 or 3: cut optimizer states, gradients, parameters along ``dp`` as well.
        microbatches: a call cuts its batch into so many, as far as the batch divides, so that the stages of ``pp`` work
            at once. For training with them see ``dtorch.parallel.schedule``.
        chunks: stages on each coordinate of ``pp``: stage ``s`` lies on ``s % pp`` (for the interleaved schedule).
        workload: for ``"best"``: batch and sequence length that calls will have.

    Raises:
        PlacementError: a layout that cannot work, before anything is placed.
    """
    if plan == "best":
        from dtorch.parallel.suggest import best_mesh

        mesh, microbatches = best_mesh(module, mesh, *workload)
        plan = "auto"
    _check_arguments(plan, zero, microbatches, chunks)
    if is_autoencoder(module):
        parallelize_decoder(module, mesh)
        return module
    tp, ep = axes(mesh, "tp"), axes(mesh, "ep")
    chosen, notes = _cuts(module, mesh, plan)
    experts = _expert_parameters(module) if ep else frozenset()
    stages = _stages(module, mesh, chunks)

    def where(name: str, t: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if name in experts:
            for axis in ep:
                placements[axis] = Shard(0)
        if name in chosen and chosen[name].dim < t.dim():
            for axis in tp:
                placements[axis] = chosen[name]
        stage = stages.mesh_of(name)
        return stage, tuple(placements[a] for a in stages.kept)

    place(module, where)
    module.__dict__[NOTES] = notes
    if zero:
        shard_states(module, [stages.kept.index(a) for a in axes(mesh, "dp")], zero)
    if ep or axes(mesh, "dp"):
        for part in find_experts(module).values():
            on_own_experts(part, [stages.kept.index(a) for a in ep])
    if tp and (sequence_parallel or wants_sequence_parallel(plan)):
        cut_between(module, chosen, [stages.kept.index(a) for a in tp])
    carrier = Carrier()
    for part, there, opens_stage in stages.entries:
        share_parameters(part.modules(), there, carrier)
        move_inputs(part, there, carrier, opens_stage)
    if stages.entries:
        later = {id(m) for part, _, _ in stages.entries for m in part.modules()}
        share_parameters([m for m in module.modules() if id(m) not in later], stages.first, carrier)
    # Where experts are spread, every device has tokens of its own outside of them.
    batch, sequence = axes(mesh, "dp", "ep"), axes(mesh, "ulysses_cp", "ring_cp")
    first = stages.first
    sequence_axes = [stages.kept.index(a) for a in sequence]
    if sequence_axes and cut_sequences(module, first, sequence_axes):
        sequence_axes = []
    cut_inputs(module, first, [stages.kept.index(a) for a in batch], sequence_axes, stages.last)
    if microbatches > 1:
        in_micro_batches(module, microbatches)
    return module


def _check_arguments(plan: str | Mapping[str, Any], zero: int, microbatches: int, chunks: int) -> None:
    if zero not in (0, 1, 2, 3):
        raise PlacementError(f"zero={zero!r}: use 0, 1, 2 or 3.")
    for name, count in (("microbatches", microbatches), ("chunks", chunks)):
        if type(count) is not int or count < 1:
            raise PlacementError(f"{name}={count!r}: use a whole number of at least 1.")
    if plan != "auto" and not isinstance(plan, Mapping):
        raise PlacementError(f"plan={plan!r}: use 'auto', 'best' or a dict of patterns to styles.")


def _cuts(module: nn.Module, mesh: DeviceMesh, plan: str | Mapping[str, Any]) -> tuple[dict[str, Shard], tuple[str, ...]]:
    """How ``tp`` cuts parameters, and what a user should know of heads and experts."""
    tp, ep = (prod(mesh.size(axis) for axis in axes(mesh, kind)) for kind in ("tp", "ep"))
    of_experts = check_experts(module, ep) if ep > 1 else ()
    if not isinstance(plan, str):
        check_plan(module, plan)
        return cuts(module, plan), of_experts
    chosen, of_heads = between_heads(module, cuts(module, None), tp)
    return chosen, of_heads + of_experts


def _expert_parameters(module: nn.Module) -> frozenset[str]:
    """Parameters that hold one matrix, or bias, for each expert, in dimension 0."""
    found = {name for name, p in module.named_parameters() if ".experts." in f".{name}" and p.dim() == 3}
    for name, part in find_experts(module).items():
        own = part.named_parameters(recurse=False)
        found.update(f"{name}.{parameter}" for parameter, p in own if p.dim() and p.shape[0] == part.num_experts)
    return frozenset(found)


class _Stages:
    """Which mesh each parameter lives on."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.kept = list(range(mesh.ndim))
        self.first = self.last = mesh
        self.prefixes: list[tuple[str, DeviceMesh]] = []
        self.entries: list[tuple[nn.Module, DeviceMesh, bool]] = []

    def mesh_of(self, name: str) -> DeviceMesh:
        """Mesh of a parameter by its full name."""
        for prefix, mesh in self.prefixes:
            if name.startswith(prefix):
                return mesh
        return self.first


def _stages(module: nn.Module, mesh: DeviceMesh, chunks: int) -> _Stages:
    stages = _Stages(mesh)
    pp = axes(mesh, "pp")
    names = mesh.mesh_dim_names or ()
    off = [a for a, n in enumerate(names) if n.startswith("pp") and a not in pp]
    if not pp:
        return stages
    if len(pp) > 1 or off:
        raise PlacementError(f"{mesh} has more than one pp axis; use one.")
    meshes = mesh.unbind(pp[0])
    if mesh.ndim > 1:
        stages.kept = [a for a in range(mesh.ndim) if a != pp[0]]
    layers = find_layers(module)
    assigned = stage_of_layers(list(layers.values()), len(meshes) * chunks)
    stages.first, stages.last = meshes[0], meshes[-1]
    for i, ((name, layer), stage) in enumerate(zip(layers.items(), assigned, strict=True)):
        there = meshes[stage % len(meshes)]
        stages.prefixes.append((f"{name}.", there))
        stages.entries.append((layer, there, i > 0 and stage != assigned[i - 1]))
    # What comes after the first list runs where the last layer ran: siblings registered after it, and the head.
    lists = list(dict.fromkeys(name.rpartition(".")[0] for name in layers))
    for name, part in _modules_after(module, lists[0]):
        if name in lists:
            continue
        stages.prefixes.append((f"{name}.", meshes[-1]))
        stages.entries.append((part, meshes[-1], False))
    return stages


def _modules_after(module: nn.Module, list_name: str) -> list[tuple[str, nn.Module]]:
    """Modules registered after the list of layers, in its own parent and in the parents above."""
    found: list[tuple[str, nn.Module]] = []
    path = list_name.split(".")
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        parent = module.get_submodule(prefix) if prefix else module
        passed = False
        for name, child in parent.named_children():
            if passed and any(True for _ in child.parameters()):
                found.append((f"{prefix}.{name}" if prefix else name, child))
            passed = passed or name == path[depth]
    return found
