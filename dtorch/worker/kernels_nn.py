"""Kernels of neural network operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dtorch.core.pieces import cut_out
from dtorch.worker.kernels import Context, kernel, stand_in

aten = torch.ops.aten
Kwargs = dict[str, Any]

_MEAN = 1  # torch's number for ``reduction="mean"``
_BAG_MEAN, _BAG_MAX = 1, 2  # torch's numbers for the modes of embedding bags


@kernel
def unless_empty(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """The operator, which may refuse empty pieces: those have empty or zero results."""
    return ctx.nothing(args[0].device) if ctx.is_empty else ctx.run(args, kwargs)


@kernel
def of_parameters(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """The operator as torch runs it when matrices and vectors require a gradient, although none is recorded here."""

    def trained(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [trained(v) for v in value]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() > 2:
            return value
        with torch.inference_mode(False):  # what is transposed of a tensor made in that mode requires none
            alias = value.new_empty(0)
            alias.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
            return alias.requires_grad_()

    return ctx.run(tuple(trained(a) for a in args), kwargs)


# -- norms and convolutions ----------------------------------------------------------------------------------------
@kernel
def group_norm_piece(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """Group norm, forward or backward, with the numbers of samples, channels and groups that are here."""
    if ctx.is_empty:
        return ctx.nothing(args[0].device)
    i = ctx.index("input")
    samples, channels = args[i].shape[:2]
    groups = ctx.argument(args, kwargs, "group") * channels // ctx.inputs[i].shape[1]
    return ctx.run(args, kwargs, N=samples, C=channels, group=groups)


@stand_in(
    "_native_batch_norm_legit.default", "_native_batch_norm_legit.no_stats", "_batch_norm_no_update.default",
    "_native_batch_norm_legit_no_training.default",
)  # fmt: skip
def batch_norm(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """Devices differ in what they return as statistics not saved: nothing, as predicted."""
    out = ctx.op(*args, **kwargs)
    return [x if s.numel else x.new_empty(s.shape) for x, s in zip(out, ctx.outputs, strict=True)]


@kernel
def convolution_piece(ctx: Context, data: torch.Tensor, weight: torch.Tensor, bias: Any, *rest: Any) -> torch.Tensor:
    """Groups are those that are here; on a piece of the input channels only one device adds the bias."""
    if ctx.is_empty:
        return ctx.nothing(data.device)  # type: ignore[no-any-return]
    *geometry, groups = rest
    groups = groups * data.shape[1] // ctx.inputs[0].shape[1] if groups > 1 else 1
    return ctx.op(data, weight, bias if ctx.is_first() else None, *geometry, groups)  # type: ignore[no-any-return]


@kernel
def convolution_backward_piece(
    ctx: Context, grad: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *rest: Any
) -> Any:
    """The bias gradient does not depend on input channels: where they are cut, one device gives it."""
    if ctx.is_empty:
        return ctx.nothing(grad.device)
    *geometry, groups, mask = rest
    groups = groups * data.shape[1] // ctx.inputs[1].shape[1] if groups > 1 else 1
    sizes = None if bias_sizes is None else [grad.shape[1]] * len(bias_sizes)
    out = list(ctx.op(grad, data, weight, sizes, *geometry, groups, mask))
    if mask[2]:
        spec, data_spec = ctx.outputs[-1], ctx.inputs[1]
        again = zip(spec.placements, data_spec.placements, spec.mesh.coordinates[ctx.position], strict=True)
        if any(p.is_partial() and q.is_shard(1) and coordinate for p, q, coordinate in again):
            out[2] = torch.zeros_like(out[2])
    return out


@stand_in("linear_backward.default")
def linear_backward(
    ctx: Context, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> tuple[Any, ...]:
    """The gradient of a weight, as torch's derivative of the folded product gives it; torch has no such operator."""
    rows = (t.reshape(-1, t.shape[-1]) for t in (grad, x))
    return None, next(rows).t().mm(next(rows)), None


@kernel
def upsample_piece(ctx: Context, x: torch.Tensor, size: Sequence[int], *scales: Any) -> torch.Tensor:
    """Nearest neighbours in the rows held here, of which each is repeated as often as in the whole."""
    if ctx.is_empty:
        return ctx.nothing(x.device)  # type: ignore[no-any-return]
    return ctx.op(x, ctx.output_shape()[2:], *scales)  # type: ignore[no-any-return]


@kernel
def affine_grid_piece(ctx: Context, theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """The size with the number of samples that are here."""
    if ctx.is_empty:
        return ctx.nothing(theta.device)  # type: ignore[no-any-return]
    return ctx.op(theta, [theta.shape[0], *size[1:]], align_corners)  # type: ignore[no-any-return]


# -- embeddings ----------------------------------------------------------------------------------------------------
def _mine(ctx: Context, indices: torch.Tensor, low: int, high: int, total: int) -> torch.Tensor:
    """Which indices lie in ``[low, high)``; none may lie outside of ``[0, total)``.

    Raises:
        IndexError: one does. A CUDA device reports that later, as torch does there.
    """
    valid = (indices >= 0) & (indices < total)
    if indices.device.type == "cpu":
        if not bool(valid.all()):
            raise IndexError(f"index out of range: an index must lie between 0 and {total - 1}")
    else:
        aten._assert_async.msg(valid.all(), f"index out of range: an index must lie between 0 and {total - 1}")
    return (indices >= low) & (indices < high)


@kernel
def embedding_piece(ctx: Context, weight: torch.Tensor, indices: torch.Tensor, *args: Any) -> torch.Tensor:
    """Rows of the part of the vocabulary that is here, zeros for the others."""
    low, high = ctx.input_span(0, 0)
    mine = _mine(ctx, indices, low, high, ctx.inputs[0].shape[0])
    if ctx.is_empty:
        return ctx.nothing(weight.device)  # type: ignore[no-any-return]
    rows = aten.embedding.default(weight, torch.where(mine, indices - low, 0))
    return rows.masked_fill_(~mine.unsqueeze(-1), 0)  # type: ignore[no-any-return]


@kernel
def embedding_renorm_piece(ctx: Context, weight: torch.Tensor, indices: torch.Tensor, *args: Any) -> torch.Tensor:
    """Shorten those of the rows that are here."""
    low, high = ctx.input_span(0, 0)
    mine = _mine(ctx, indices, low, high, ctx.inputs[0].shape[0])
    if bool(mine.any()):
        ctx.op(weight, indices[mine] - low, *args)
    return weight


@stand_in("_embedding_bag.default", "_embedding_bag_forward_only.default")
@kernel
def embedding_bag_piece(
    ctx: Context, weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, by_frequency: bool = False,
    mode: int = 0, sparse: bool = False, per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> list[torch.Tensor]:  # fmt: skip
    """Bags of the rows that are here, and what the derivative needs: the bag of every index, the size of every bag and,
    for the largest, which index it was. torch's CPU kernel leaves some of that out, in ways hard to predict."""
    bags = offsets.numel() - include_last_offset
    rows = torch.arange(indices.numel(), device=indices.device)
    bag_of = torch.searchsorted(offsets[:bags].long(), rows, right=True) - 1
    counted = indices != padding_idx
    size = torch.zeros(offsets.numel(), dtype=torch.long, device=indices.device).index_add_(0, bag_of, counted.long())
    largest = torch.zeros(ctx.output_shape(3), dtype=ctx.outputs[3].dtype, device=weight.device)
    low, high = ctx.input_span(0, 0)
    if high - low == ctx.inputs[0].shape[0] and weight.shape[1]:
        out, _, _, found = ctx.op(
            weight, indices, offsets, by_frequency, mode, sparse, per_sample_weights, include_last_offset, padding_idx
        )
        largest = found.to(largest.dtype) if mode == _BAG_MAX else largest
    else:
        mine = _mine(ctx, indices, low, high, ctx.inputs[0].shape[0]) & counted
        picked = weight[indices[mine] - low].to(torch.promote_types(weight.dtype, torch.float32))
        if per_sample_weights is not None:
            picked = picked * per_sample_weights[mine].unsqueeze(-1)
        out = picked.new_zeros(bags, weight.shape[1]).index_add_(0, bag_of[mine], picked)
        if mode == _BAG_MEAN:
            out = out / size[:bags].clamp(min=1).unsqueeze(-1)
        out = out.to(weight.dtype)
    return [out, bag_of.to(ctx.outputs[1].dtype), size.to(ctx.outputs[2].dtype), largest]


# -- losses --------------------------------------------------------------------------------------------------------
def _share(ctx: Context) -> float:
    """The part of the input's elements that is here."""
    i = ctx.index("self")
    return math.prod(ctx.inputs[i].local_shape(ctx.position)) / ctx.inputs[i].numel


@kernel
def mean_loss_piece(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """The mean of the piece times its share; the sum of that over the devices is the mean of all."""
    if ctx.is_empty:
        return ctx.nothing(args[0].device)
    out = ctx.run(args, kwargs)
    return out * _share(ctx) if isinstance(out, torch.Tensor) else (out[0] * _share(ctx), *out[1:])


@kernel
def mean_loss_backward_piece(ctx: Context, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The derivative of that."""
    if ctx.is_empty:
        return ctx.nothing(args[0].device)  # type: ignore[no-any-return]
    return ctx.run(args, kwargs).mul_(_share(ctx))  # type: ignore[no-any-return]


def _classes(ctx: Context, slot: int) -> tuple[int, int]:
    """The classes held here: dimension 1, or 0 of an input without samples."""
    return ctx.input_span(slot, min(1, ctx.inputs[slot].ndim - 1))


_IGNORED = -100


def _here(ctx: Context, slot: int, target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, int]:
    """Targets counted from the first class held here, and the number that marks those to ignore."""
    low, high = _classes(ctx, slot)
    total = ctx.inputs[slot].shape[min(1, ctx.inputs[slot].ndim - 1)]
    if high - low == total:
        return target, ignored
    mine = _mine(ctx, torch.where(target == ignored, 0, target), low, high, total) & (target != ignored)
    return torch.where(mine, target - low, _IGNORED), _IGNORED


def _weight(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype) -> torch.Tensor:
    """Sum of the weights of targets, one each when there are none, in single precision or better."""
    counted = target != ignored
    each = counted if weight is None else weight[torch.where(counted, target, 0)] * counted
    return each.sum(dtype=torch.promote_types(dtype, torch.float32))


@kernel
def nll_loss_piece(
    ctx: Context, data: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int
) -> Any:
    """The loss of the elements held here. A mean is divided by the weight of all targets, which then are all known."""
    if reduction != _MEAN:
        if ctx.is_empty:
            return ctx.nothing(data.device)
        target, ignored = _here(ctx, 0, target, ignored)
        return ctx.op(data, target, weight, reduction, ignored)
    if ctx.is_empty:
        return ctx.nothing(data.device)
    total = _weight(target, weight, ignored, data.dtype)
    if target.ndim:
        spans = ctx.inputs[0].spans(ctx.position)
        target = cut_out(target, [spans[d] for d in range(data.ndim) if d != 1])
    if weight is not None:
        weight = weight[slice(*_classes(ctx, 0))]
    target, ignored = _here(ctx, 0, target, ignored)
    mean, here = ctx.op(data, target, weight, reduction, ignored)
    # Without a counted target here the mean is 0 / 0; without one anywhere the loss is.
    return [(torch.where(here == 0, 0, mean) * (here / total)).to(mean.dtype), here]


@kernel
def nll_loss_backward_piece(
    ctx: Context, grad: torch.Tensor, data: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int,
    ignored: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the classes held here."""
    if ctx.is_empty:
        return ctx.nothing(data.device)  # type: ignore[no-any-return]
    target, ignored = _here(ctx, 1, target, ignored)
    return ctx.op(grad, data, target, weight, reduction, ignored, total_weight)  # type: ignore[no-any-return]


@kernel
def linear_cross_entropy_piece(
    ctx: Context, data: torch.Tensor, layer: torch.Tensor, target: torch.Tensor, bias: Any, weight: Any,
    reduction: str, ignored: int, *rest: Any,
) -> Any:  # fmt: skip
    """Loss and gradients of the samples held here, with a mean over all of them: as for nll_loss."""
    if ctx.is_empty:
        return ctx.nothing(data.device)
    if reduction != "mean":
        return ctx.op(data, layer, target, bias, weight, reduction, ignored, *rest)
    mine = target[slice(*ctx.input_span(0, 0))]
    total, here = (_weight(t, weight, ignored, data.dtype) for t in (target, mine))
    out = ctx.op(data, layer, mine, bias, weight, reduction, ignored, *rest)
    return [(torch.where(here == 0, 0, x) * (here / total)).to(x.dtype) for x in out]


@stand_in("_ctc_loss.default", "_ctc_loss.Tensor", "_ctc_loss_backward.default", "_ctc_loss_backward.Tensor")
@kernel
def ctc_loss_piece(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """The samples held here: their lengths, and their part of targets that stand end to end. Alphas get the size that
    was predicted, which may be more than these samples need."""
    if ctx.is_empty:
        return ctx.nothing(args[0].device)
    i = ctx.index("log_probs")
    low, high = ctx.input_span(i, 1)
    targets, lengths = args[i + 1], args[i + 3]
    changes: Kwargs = {}
    if isinstance(lengths, list):
        start = sum(lengths[:low]) if targets.ndim == 1 else 0
        changes = {"input_lengths": args[i + 2][low:high], "target_lengths": lengths[low:high]}
        lengths = lengths[low:high]
        if targets.ndim == 1:
            changes["targets"] = targets[start : start + sum(lengths)]
        longest = max(lengths, default=0)
    else:
        longest = int(lengths.max())
    size = 2 * longest + 1
    positional = list(args)
    for name, value in changes.items():
        positional[ctx.index(name)] = value
    if i:
        j = ctx.index("log_alpha")
        positional[j] = positional[j][..., :size].contiguous()
        return ctx.op(*positional, **kwargs)
    loss, alpha = ctx.op(*positional, **kwargs)
    if len(ctx.outputs) < 2:  # the shape was not predicted
        return loss, alpha
    return loss, F.pad(alpha, (0, ctx.output_shape(1)[2] - alpha.shape[2]))
