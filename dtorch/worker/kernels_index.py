"""Kernels of operators whose numbers speak of global positions, and of those that a device lacks for some dtypes."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.core.spec import TensorSpec
from dtorch.worker.kernels import Context, kernel, stand_in


@kernel
def triangle_piece(ctx: Context, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """tril, triu: a diagonal counted from the corner of the whole matrix."""
    (row, _), (column, _) = ctx.input_span(0, -2), ctx.input_span(0, -1)
    return ctx.op(x, diagonal + row - column)  # type: ignore[no-any-return]


@kernel
def trace_piece(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """The sum over the part of the diagonal that runs through this piece of the matrix."""
    (row, _), (column, _) = ctx.input_span(0, 0), ctx.input_span(0, 1)
    return x.diagonal(row - column).sum()


def _before(ctx: Context, spec: TensorSpec, dim: int, index: int) -> int:
    """How much of a dimension of the piece held here stands before a global index."""
    return sum(max(0, min(b, index) - a) for a, b in spec.spans(ctx.position)[dim])


def _line(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any], spec: TensorSpec) -> tuple[int, int]:
    """The dimension of an operator that takes parts of it, and the global index of the first part."""
    dim = ctx.argument(args, kwargs, "dim") % spec.ndim
    names = [a.name for a in ctx.op._schema.arguments]
    start = (ctx.argument(args, kwargs, "start") or 0) if "start" in names else 0
    return dim, slice(start, None).indices(spec.shape[dim])[0]


@kernel
def stretches_piece(ctx: Context, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """slice, split and their kin between the segments of a cut dimension."""
    dim, start = _line(ctx, (x, *args), kwargs, ctx.inputs[0])
    found = []
    for i, spec in enumerate(ctx.outputs):
        found.append(x.narrow(dim, _before(ctx, ctx.inputs[0], dim, start), ctx.output_shape(i)[dim]))
        start += spec.shape[dim]
    if "copy" in ctx.op._schema.name:
        found = [part.clone() for part in found]
    return found[0] if str(ctx.op._schema.returns[0].type) == "Tensor" else found


@kernel
def slice_backward_piece(ctx: Context, grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Zeros in the shape of the piece, with the gradient of the slice in its place."""
    out = grad.new_zeros(ctx.output_shape())
    dim, start = _line(ctx, (grad, *args), kwargs, ctx.outputs[0])
    out.narrow(dim, _before(ctx, ctx.outputs[0], dim, start), grad.shape[dim]).copy_(grad)
    return out


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
