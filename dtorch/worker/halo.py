"""Convolutions of images that are cut along a dimension of space: neighbours give each other the rows at the border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.core.steps import ROWS
from dtorch.worker.kernels import KERNELS
from dtorch.worker.ring import RINGS, Arguments, Ring


def halo_convolution(ring: Ring, arguments: Sequence[Arguments]) -> list[Any]:
    """Raw results on each local device. Beyond the ends of the whole tensor there are zeros."""
    data = [args[0] for args, _ in arguments]
    whole = ring.contexts[0].inputs[0]
    dim, width = ROWS, ring.plan.rounds[0][0][1].src.local_shape(0)[ROWS]
    after = ring.send(0, 0, [x.narrow(dim, 0, width) for x in data])
    before = ring.send(1, 0, [x.narrow(dim, x.shape[dim] - width, width) for x in data])
    results = []
    for k, ctx in enumerate(ring.contexts):
        start, stop = ctx.input_span(0, dim)
        parts = [
            before[k] if start else torch.zeros_like(before[k]), data[k],
            after[k] if stop < whole.shape[dim] else torch.zeros_like(after[k]),
        ]  # fmt: skip
        layout = torch.channels_last if data[k].dim() == 4 and _is_channels_last(data[k]) else torch.contiguous_format
        joined = torch.cat(parts, dim).contiguous(memory_format=layout)
        (_, weight, bias, stride, padding, *rest), kwargs = arguments[k]
        padding = [*padding] if len(padding) > 1 else [*padding] * (whole.ndim - 2)
        padding[dim - 2] = 0
        results.append(KERNELS["convolution_piece"](ctx, joined, weight, bias, stride, padding, *rest, **kwargs))
    return results


def _is_channels_last(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


RINGS["halo_convolution"] = halo_convolution
