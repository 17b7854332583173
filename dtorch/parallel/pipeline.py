"""Pipeline stages: consecutive layers on consecutive meshes, activations moved between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dtorch.client.tensor import DTensor
from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.parallel.inputs import map_tensors, on_mesh
from dtorch.parallel.schedule import Args, Kwargs, at_boundary


def assign_layers_to_stages(num_layers: int, num_stages: int) -> list[int]:
    """Stage of each layer: consecutive, as even as possible, the first stages taking the remainder.

    Raises:
        PlacementError: more stages than layers, or no stage.
    """
    if not 1 <= num_stages <= max(num_layers, 1):
        raise PlacementError(f"{num_layers} layers cannot fill {num_stages} pipeline stages: use at most one stage a layer.")
    return [layer * num_stages // num_layers for layer in range(num_layers)]


def stage_of_layers(layers: Sequence[nn.Module], num_stages: int) -> list[int]:
    """Stage of each layer, balanced by parameter bytes.

    Raises:
        PlacementError: more stages than layers.
    """
    assign_layers_to_stages(len(layers), num_stages)  # for its checks
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) or 1 for layer in layers]
    total, done, stage = sum(sizes), 0, 0
    out: list[int] = []
    for i, size in enumerate(sizes):
        left = len(sizes) - i
        # A layer opens the next stage when its middle lies beyond the stage's share, and every stage gets a layer.
        if out and stage + 1 < num_stages and (
            (done + size / 2) * num_stages > total * (stage + 1) or left == num_stages - 1 - stage
        ):
            stage += 1
        out.append(stage)
        done += size
    return out


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model by name: those of its largest list of layers and of the lists beside it, in order.

    Raises:
        PlacementError: it has none.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    lists = [(n, m) for n, m in lists if not any(n != o and n.startswith(f"{o}.") for o, _ in lists)]
    if not lists:
        raise PlacementError(f"{type(model).__name__} has no list of layers to put on pipeline stages.")
    largest, _ = max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
    beside = [(n, m) for n, m in lists if n.rpartition(".")[0] == largest.rpartition(".")[0]]
    return {f"{name}.{i}": layer for name, layers in beside for i, layer in enumerate(layers)}


class Carrier:
    """Brings tensors to the stages' meshes: each once to a stage, from the stage that had it last.

    Thus an early stage has no part in what later ones do, and goes on with the next micro-batch. A copy lives as long as
    its original, unless that is written. What needs a gradient is brought anew each time, as its graph is used once.
    """

    def __init__(self) -> None:
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def bring(self, t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The tensor on this mesh; differentiable."""
        if not isinstance(t, DTensor) or t.device_mesh == mesh:
            return on_mesh(t, mesh)
        if t.is_inference() or (t.requires_grad and torch.is_grad_enabled()):
            return on_mesh(t, mesh)
        state = t._h.id, t._version, torch.is_inference_mode_enabled()
        known, copies = self._copies.get(t, (None, []))
        if known != state:
            copies = []
            self._copies[t] = state, copies
        found: torch.Tensor | None = next((c for c in copies if c.device_mesh == mesh), None)
        if found is None:
            found = on_mesh(copies[-1] if copies else t, mesh)
            copies.append(found)
        return found


def move_inputs(module: nn.Module, mesh: DeviceMesh, carrier: Carrier, opens_stage: bool) -> None:
    """Before every call of ``module``, bring its tensor arguments to ``mesh``; differentiable.

    Args:
        module: a layer, or what follows the layers.
        mesh: of its stage.
        carrier: shared by all stages.
        opens_stage: whether it is the first of a later stage: there a schedule may let another micro-batch go first.
    """

    def change(t: torch.Tensor) -> torch.Tensor:
        return carrier.bring(t, mesh)

    def move(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return map_tensors(args, change), map_tensors(kwargs, change)

    def hook(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        return at_boundary(args, kwargs, move) if opens_stage else move(args, kwargs)

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)


def share_parameters(parts: Iterable[nn.Module], mesh: DeviceMesh, carrier: Carrier) -> None:
    """Before one of the modules runs, bring the parameters it shares with another stage (tied weights) to ``mesh``.

    Their gradients go back the same way and are added to those of the stage that keeps the parameter.
    """
    for part in parts:
        names = [n for n, p in part._parameters.items() if isinstance(p, DTensor) and p.device_mesh != mesh]
        if names:
            _bring_before_use(part, names, mesh, carrier)


def _bring_before_use(part: nn.Module, names: Sequence[str], mesh: DeviceMesh, carrier: Carrier) -> None:
    def bring(_: nn.Module, args: Any) -> None:
        for name in names:
            p = part._parameters[name]
            assert p is not None
            part.__dict__[name] = carrier.bring(p, mesh)

    def drop(_: nn.Module, args: Any, output: Any) -> None:
        for name in names:
            part.__dict__.pop(name, None)

    part.register_forward_pre_hook(bring)
    part.register_forward_hook(drop, always_call=True)
