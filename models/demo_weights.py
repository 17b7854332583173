"""Seeded random weights that keep activations near unit size, so that a random model still draws a lively picture."""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

import torch

Model = TypeVar("Model", bound=torch.nn.Module)

# Share of the decoder's output kept: pictures use most of the range from black to white without being clipped.
_CONTRAST = 0.5


def fill(model: Model, name: str) -> Model:
    """Set every parameter of `model` from a generator seeded by `name` and the parameter's own name.

    A weight thus depends on nothing but its name and shape, whatever the initialisation of the library. Returns the
    model, in evaluation mode.
    """
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(_weight(f"{name}.{key}", parameter))
    return model.eval()


def _weight(key: str, like: torch.Tensor) -> torch.Tensor:
    """Values for the parameter `key`, shaped like `like`: ones for norms, zeros for biases, scaled noise otherwise."""
    if like.ndim < 2:
        return torch.full(like.shape, 0.0 if key.endswith("bias") else 1.0)
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big")
    generator = torch.Generator().manual_seed(seed)
    values: torch.Tensor = torch.randn(like.shape, generator=generator) / math.sqrt(like[0].numel())
    if key.startswith("vae.") and like.shape[2:] == (3, 3):
        values = _smooth(values, generator)
    return values.mul(_CONTRAST) if key == "vae.decoder.conv_out.weight" else values


def _smooth(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Convolution kernels (out, in, 3, 3) that mostly blur, of the same size: pictures show patches, not noise."""
    bell = torch.tensor([1.0, 2.0, 1.0])
    blur = torch.outer(bell, bell)
    blur *= math.sqrt(blur.numel()) / blur.norm()
    mix = torch.randn(*values.shape[:2], 1, 1, generator=generator) / math.sqrt(values[0].numel())
    return blur.mul(0.9 * mix).add(values, alpha=0.4)
