"""Pieces of whole tensors: cut one out, put one back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.core.spec import Box, Span, TensorSpec


def slices(box: Box) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(a, b) for a, b in box)


def indices(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """The indices in spans, one after the other (int64)."""
    ranges = [torch.arange(a, b, device=device) for a, b in spans]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges)


def piece_of(whole: torch.Tensor, spec: TensorSpec, position: int) -> torch.Tensor:
    """What the device at this position holds of a tensor: a view where that is a box, else a new tensor."""
    return cut_out(whole, spec.spans(position))


def cut_out(whole: torch.Tensor, spans_of_dims: Sequence[Sequence[Span]]) -> torch.Tensor:
    """The spans of each dimension, one after the other: a view where each has one, else a new tensor."""
    for dim, spans in enumerate(spans_of_dims):
        parts = [whole.narrow(dim, a, b - a) for a, b in spans]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def put_piece(whole: torch.Tensor, spec: TensorSpec, position: int, piece: torch.Tensor) -> None:
    """Write what a device holds to its places in the whole tensor."""
    for box, here in spec.parts(position):
        whole[slices(box)] = piece[slices(here)]
