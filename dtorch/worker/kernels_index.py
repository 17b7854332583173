"""Kernels of operators whose numbers speak of global positions, and of those that a device lacks for some dtypes."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.worker.kernels import Context, kernel, stand_in


@kernel
def triangle_piece(ctx: Context, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """tril, triu: a diagonal counted from the corner of the whole matrix."""
    (row, _), (column, _) = ctx.input_box(0)[-2:]
    return ctx.op(x, diagonal + row - column)  # type: ignore[no-any-return]


@kernel
def trace_piece(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """The sum over the part of the diagonal that runs through this piece of the matrix."""
    (row, _), (column, _) = ctx.input_box(0)
    return x.diagonal(row - column).sum()


@kernel
def new_strided_piece(ctx: Context, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """new_empty_strided: strides of the whole do not fit a piece; the result gets the piece's afterwards."""
    return x.new_empty(ctx.output_shape(), **kwargs)


@stand_in("view_as_real.default", "view.dtype")
def written_out(ctx: Context, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """Conjugation is a flag of tensors on workers only, and views of the bits want it written out first."""
    return ctx.op(x.resolve_conj().resolve_neg(), *args)  # type: ignore[no-any-return]


@stand_in("histc.default")
def histc(ctx: Context, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Histogram, of whole numbers too: CUDA counts them, the CPU has no kernel for them."""
    if x.dtype.is_floating_point or x.device.type != "cpu":
        return ctx.op(x, *args, **kwargs)  # type: ignore[no-any-return]
    return ctx.op(x.double(), *args, **kwargs).to(x.dtype)  # type: ignore[no-any-return]
