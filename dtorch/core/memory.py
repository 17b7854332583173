"""Bytes of plain CPU tensors."""

from __future__ import annotations

from typing import Any

import numpy
import torch


def raw(t: torch.Tensor) -> Any:
    """The bytes of a contiguous CPU tensor as a numpy array that shares its memory."""
    flat = t.as_strided((t.numel(),), (1,))  # one element may have any stride, which view(dtype) refuses
    return flat.view(torch.uint8).numpy()


def copy(out: torch.Tensor, t: torch.Tensor) -> None:
    """``out.copy_(t)``, on one thread where bytes are all that is copied.

    torch would wake its threads for every piece, which on busy cores takes longer than the copying.
    """
    plain = out.dtype == t.dtype and out.shape == t.shape and out.device == t.device and t.device.type == "cpu"
    if plain and out.is_contiguous() and t.is_contiguous() and not (t.is_conj() or t.is_neg()):
        numpy.copyto(raw(out), raw(t))
    else:
        out.copy_(t)
