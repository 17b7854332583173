"""``dtorch.parallelize``: from a mesh with named axes to a placed module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.parallel.axes import axes
from dtorch.parallel.inputs import cut_inputs
from dtorch.parallel.pipeline import find_layers, move_inputs, stage_of_layers
from dtorch.parallel.place import place
from dtorch.parallel.plans import cuts
from dtorch.parallel.zero import shard_states


def parallelize(
    module: nn.Module, mesh: DeviceMesh, plan: str | Mapping[str, Any] = "auto", *, zero: int = 0
) -> nn.Module:
    """Place a module on a mesh; its code does not change, and it is called as before.

    Axes of the mesh by name, each size 1 means off: ``dp`` cuts the batch of the inputs, ``tp`` the layers, ``pp``
    the list of layers, ``ulysses_cp`` and ``ring_cp`` the sequence of the inputs, ``ep`` the experts.

    Args:
        module: changed in place, and returned.
        mesh: with ``mesh_dim_names``.
        plan: ``"auto"``: the model's own tensor-parallel plan, or one found for it; or a dict of patterns of module
            names (``*`` matches one part) to styles such as ``"colwise"`` and ``"rowwise"``.
        zero: 0, 1, 2 or 3: cut optimizer states, gradients, parameters along ``dp`` as well.

    Raises:
        PlacementError: a layout that cannot work, before anything is placed.
    """
    if zero not in (0, 1, 2, 3):
        raise PlacementError(f"zero={zero!r}: use 0, 1, 2 or 3.")
    if isinstance(plan, str) and plan != "auto":
        raise PlacementError(f"plan={plan!r}: use 'auto' or a dict of patterns to styles.")
    chosen = cuts(module, None if isinstance(plan, str) else plan)
    tp, ep = axes(mesh, "tp"), axes(mesh, "ep")
    experts = _expert_parameters(module) if ep else frozenset()
    stages = _stages(module, mesh)

    def where(name: str, t: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if name in experts:
            for axis in ep:
                placements[axis] = Shard(0)
        if name in chosen and chosen[name] < t.dim():
            for axis in tp:
                placements[axis] = Shard(chosen[name])
        stage = stages.mesh_of(name)
        return stage, tuple(placements[a] for a in stages.kept)

    place(module, where)
    if zero:
        shard_states(module, [stages.kept.index(a) for a in axes(mesh, "dp")], zero)
    for part, there in stages.entries:
        move_inputs(part, there)
    batch, sequence = axes(mesh, "dp"), axes(mesh, "ulysses_cp", "ring_cp")
    first = stages.first
    cut_inputs(module, first, [stages.kept.index(a) for a in batch], [stages.kept.index(a) for a in sequence])
    return module


def _expert_parameters(module: nn.Module) -> frozenset[str]:
    """Parameters that hold one matrix for each expert, in dimension 0."""
    found = {
        name for name, p in module.named_parameters() if ".experts." in f".{name}" and p.dim() == 3
    }
    return frozenset(found)


class _Stages:
    """Which mesh each parameter lives on."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.kept = list(range(mesh.ndim))
        self.first = self.last = mesh
        self.prefixes: list[tuple[str, DeviceMesh]] = []
        self.entries: list[tuple[nn.Module, DeviceMesh]] = []

    def mesh_of(self, name: str) -> DeviceMesh:
        """Mesh of a parameter by its full name."""
        for prefix, mesh in self.prefixes:
            if name.startswith(prefix):
                return mesh
        return self.first


def _stages(module: nn.Module, mesh: DeviceMesh) -> _Stages:
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
    list_name, layers = find_layers(module)
    assigned = stage_of_layers(list(layers), len(meshes))
    stages.first, stages.last = meshes[0], meshes[-1]
    for i, (layer, stage) in enumerate(zip(layers, assigned, strict=True)):
        stages.prefixes.append((f"{list_name}.{i}.", meshes[stage]))
        stages.entries.append((layer, meshes[stage]))
    # What comes after the list runs where the last layer ran: siblings registered after it, and the head.
    after = _modules_after(module, list_name)
    for name, part in after:
        stages.prefixes.append((f"{name}.", meshes[-1]))
        stages.entries.append((part, meshes[-1]))
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
