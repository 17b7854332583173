"""Autoencoders of images on several devices: each decodes some rows of the image, or some images of the batch.

Weights are whole on every device. Convolutions exchange rows at the borders, group norms their sums (see
``dtorch.planner.context`` and ``dtorch.client.statistics``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dtorch.client.tensor import DTensor
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.parallel.axes import axes
from dtorch.parallel.inputs import on_mesh
from dtorch.parallel.place import place


def is_autoencoder(module: nn.Module) -> bool:
    """Whether a module decodes latents to images, as diffusers' autoencoders do."""
    return hasattr(module, "decode") and isinstance(getattr(module, "decoder", None), nn.Module)


def parallelize_decoder(module: nn.Module, mesh: DeviceMesh) -> None:
    """Place an autoencoder; its decoder then cuts latents (samples, channels, rows, columns) as far as they go.

    Samples are cut along the ``dp`` axes where they divide evenly, rows along the first axis that is left, whatever it
    is for elsewhere. What the decoder returns is whole.
    """
    place(module, lambda name, t: (mesh, (Replicate(),) * mesh.ndim))
    decoder: Any = module.decoder
    batch = axes(mesh, "dp")

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], torch.Tensor) or args[0].dim() != 4:
            return None
        latents = on_mesh(args[0], mesh)
        wanted: list[Placement] = [Replicate()] * mesh.ndim
        samples = latents.shape[0]
        for axis in batch:
            if samples % mesh.size(axis) == 0:
                wanted[axis] = Shard(0)
                samples //= mesh.size(axis)
        rows = next((a for a in range(mesh.ndim) if wanted[a].is_replicate() and 1 < mesh.size(a) <= latents.shape[2]), None)
        if rows is not None:
            wanted[rows] = Shard(2)
        return (latents.redistribute(placements=wanted), *args[1:])  # type: ignore[attr-defined]

    def whole(_module: nn.Module, _args: Any, image: Any) -> Any:
        return image.redistribute(placements=[Replicate()] * mesh.ndim) if isinstance(image, DTensor) else image

    decoder.register_forward_pre_hook(cut)
    decoder.register_forward_hook(whole)
