"""Softmax and batch norm over cut dimensions of large tensors, in parts: only what each row or channel sums to travels.

Thus logits stay cut along the vocabulary up to the loss, and images along the batch through training. Small tensors are
gathered instead, by their placement rules: that costs the same and keeps the bits of one device.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.client.dispatch import info_of, run
from dtorch.client.specials import Args, Kwargs, special
from dtorch.core.placements import Shard
from dtorch.planner.redistribute import LATENCY_BYTES

aten = torch.ops.aten


_NONE: frozenset[int] = frozenset()


def _cut_dims(x: Any) -> frozenset[int]:
    """Dimensions along which a tensor is cut that is too large to gather."""
    spec = x._h.spec
    if spec.nbytes <= LATENCY_BYTES:
        return _NONE
    return frozenset(p.dim for p in spec.placements if isinstance(p, Shard))


def _given(func: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """All arguments by name; those that have defaults must be given."""
    return {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In single precision at least, as torch computes inside of its own kernels."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# -- softmax -------------------------------------------------------------------------------------------------------
@special(aten._softmax.default, aten._log_softmax.default)
def softmax(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Largest value and sum of each row are what devices tell each other."""
    given = _given(func, args, kwargs)
    x, dim = given["self"], given["dim"]
    if not x.ndim or dim % x.ndim not in _cut_dims(x):
        return run(cls, func, info_of(func), args, kwargs)
    with torch.no_grad():
        shifted = _wide(x) - _wide(x).amax(dim, True)
        powers = shifted.exp()
        total = powers.sum(dim, True)
        out = powers / total if func is aten._softmax.default else shifted - total.log()
        return out if given["half_to_float"] else out.to(x.dtype)


@special(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The same with one sum for each row."""
    given = _given(func, args, kwargs)
    grad, out, dim, dtype = (given[name] for name in ("grad_output", "output", "dim", "input_dtype"))
    if not out.ndim or dim % out.ndim not in _cut_dims(out):
        return run(cls, func, info_of(func), args, kwargs)
    with torch.no_grad():
        grad, out = _wide(grad), _wide(out)
        if func is aten._softmax_backward_data.default:
            weighed = grad * out
            return (weighed - out * weighed.sum(dim, True)).to(dtype)
        return (grad - out.exp() * grad.sum(dim, True)).to(dtype)


# -- group norm ----------------------------------------------------------------------------------------------------
@special(aten.native_group_norm.default)
def group_norm(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Of images that are cut along space, of any size: mean and variance of each group are what devices tell each other."""
    given = _given(func, args, kwargs)
    x, groups = given["input"], given["group"]
    if not any(isinstance(p, Shard) and p.dim > 1 for p in x._h.spec.placements) or not x.numel():
        return run(cls, func, info_of(func), args, kwargs)
    with torch.no_grad():
        samples, channels, *space = x.shape
        wide = _wide(x).view(samples, groups, channels // groups, *space)
        dims = list(range(2, wide.ndim))
        mean = wide.mean(dims, True)
        centred = wide - mean
        deviation = (centred.square().mean(dims, True) + given["eps"]).rsqrt()
        out = (centred * deviation).view(x.shape)
        shape = (channels, *(1,) * len(space))
        if given["weight"] is not None:
            out = out * given["weight"].view(shape)
        if given["bias"] is not None:
            out = out + given["bias"].view(shape)
        return out.to(x.dtype), *(t.view(samples, groups).to(x.dtype) for t in (mean, deviation))


# -- batch norm ----------------------------------------------------------------------------------------------------
def _by_channel(x: Any) -> tuple[list[int], tuple[int, ...]]:
    """The dimensions to average over, and the shape in which a value for each channel lines up with the tensor."""
    return [d for d in range(x.ndim) if d != 1], tuple(n if d == 1 else 1 for d, n in enumerate(x.shape))


@special(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats)
def batch_norm(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """In training: mean and variance of each channel are what devices tell each other."""
    given = _given(func, args, kwargs)
    x = given["input"]
    if not given["training"] or not _cut_dims(x) - {1}:
        return run(cls, func, info_of(func), args, kwargs)
    with torch.no_grad():
        dims, shape = _by_channel(x)
        wide, count = _wide(x), x.numel() // x.shape[1]
        mean = wide.mean(dims)
        centred = wide - mean.view(shape)
        variance = centred.square().mean(dims)
        deviation = (variance + given["eps"]).rsqrt()
        scale = deviation if given["weight"] is None else deviation * given["weight"]
        out = centred * scale.view(shape)
        if given["bias"] is not None:
            out = out + given["bias"].view(shape)
        momentum = given["momentum"]
        for name, value in (("running_mean", mean), ("running_var", variance * (count / max(count - 1, 1)))):
            if given.get(name) is not None:
                given[name].mul_(1 - momentum).add_(value, alpha=momentum)
        return out.to(x.dtype), mean, deviation


@special(aten.native_batch_norm_backward.default)
def batch_norm_backward(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The same with two sums for each channel."""
    given = _given(func, args, kwargs)
    x, grad = given["input"], given["grad_out"]
    if not given["train"] or not _cut_dims(x) - {1}:
        return run(cls, func, info_of(func), args, kwargs)
    with torch.no_grad():
        dims, shape = _by_channel(x)
        count = x.numel() // x.shape[1]
        mean, deviation, weight = given["save_mean"], given["save_invstd"], given["weight"]
        grad_wide = _wide(grad)
        normal = (_wide(x) - mean.view(shape)) * deviation.view(shape)
        total, moment = grad_wide.sum(dims), (grad_wide * normal).sum(dims)
        scale = deviation if weight is None else deviation * weight
        grads: list[Any] = [None, moment, total]
        if given["output_mask"][0]:
            mixed = grad_wide - (total / count).view(shape) - normal * (moment / count).view(shape)
            grads[0] = (mixed * scale.view(shape)).to(x.dtype)
        dtype = x.dtype if weight is None else weight.dtype
        return [
            (g if i == 0 else g.to(dtype)) if asked else None
            for i, (g, asked) in enumerate(zip(grads, given["output_mask"], strict=True))
        ]
