"""Pipeline stages: consecutive layers on consecutive meshes, activations moved between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh
from dtorch.parallel.inputs import map_tensors, on_mesh


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


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The longest list of layers of a model, by name.

    Raises:
        PlacementError: it has none.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
    lists = [(n, m) for n, m in lists if not any(n != o and n.startswith(f"{o}.") for o, _ in lists)]
    if not lists:
        raise PlacementError(f"{type(model).__name__} has no list of layers to put on pipeline stages.")
    return max(lists, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))


def move_inputs(module: nn.Module, mesh: DeviceMesh) -> None:
    """Before every call of ``module``, bring its tensor arguments to ``mesh``; differentiable."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def change(t: torch.Tensor) -> torch.Tensor:
            return on_mesh(t, mesh)

        return map_tensors(args, change), map_tensors(kwargs, change)

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
