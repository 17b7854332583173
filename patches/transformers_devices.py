"""Devices that transformers chooses: automatic device maps, the device of pipelines and of the Trainer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .accelerate_devices import on_mesh_alone
from .base import Patch, Replacement, default_mesh_device


def _place_pipeline(init: Callable[..., None]) -> Callable[..., None]:
    """``Pipeline.__init__``: a number counts accelerators, and without a device the first one is meant."""

    @functools.wraps(init)
    def call(self: Any, model: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        placed = getattr(model, "hf_device_map", None)
        if placed is None:
            if device is None:
                device = model.device if model.device.type == "dtorch" else default_mesh_device()
            elif isinstance(device, int) and device >= 0:
                device = torch.device("dtorch", device)
        init(self, model, *args, device=device, **kwargs)
        first = next(iter(placed.values())) if placed else None
        if isinstance(first, int):
            self.device = torch.device("dtorch", first)

    return call


def _train_on_mesh(setup_devices: Any) -> Any:
    """``TrainingArguments._setup_devices``, a cached property: its last resort is the CPU, here the default mesh."""

    def setup(self: Any) -> torch.device:
        device: torch.device = setup_devices.func(self)
        if device.type != "cpu" or self.use_cpu:
            return device
        self._n_gpu = 1
        return default_mesh_device()

    replaced = functools.cached_property(setup)
    replaced.attrname = setup_devices.attrname
    return replaced


def _replacements() -> Iterator[Replacement]:
    from transformers import training_args
    from transformers.integrations import accelerate
    from transformers.pipelines.base import Pipeline

    yield Replacement(accelerate, "accelerate_max_memory", on_mesh_alone)
    yield Replacement(Pipeline, "__init__", _place_pipeline)
    yield Replacement(training_args.TrainingArguments, "_setup_devices", _train_on_mesh)
    yield Replacement(training_args, "is_torch_bf16_gpu_available", lambda _: lambda: True)


TRANSFORMERS_DEVICES = Patch(
    name="transformers-devices",
    library="transformers",
    versions=((5, 24), (5, 25)),
    reason='pipeline(device=0), device_map="auto" and Trainer would use the CPU, and Trainer(bf16=True) would refuse',
    replacements=_replacements,
)
