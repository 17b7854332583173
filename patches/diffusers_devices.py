"""Devices that diffusers chooses: ``device_map="balanced"`` for pipelines, ``"auto"`` for models."""

from __future__ import annotations

from collections.abc import Iterator

from .accelerate_devices import on_mesh_alone
from .base import Patch, Replacement


def _replacements() -> Iterator[Replacement]:
    from diffusers.models import model_loading_utils
    from diffusers.pipelines import pipeline_loading_utils

    for module in (model_loading_utils, pipeline_loading_utils):
        yield Replacement(module, "get_max_memory", on_mesh_alone)


DIFFUSERS_DEVICES = Patch(
    name="diffusers-devices",
    library="diffusers",
    versions=((0, 42), (0, 43)),
    reason='device_map="balanced" and "auto" would use the CPU',
    replacements=_replacements,
)
