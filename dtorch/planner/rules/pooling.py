"""Pooling, unpooling, resizing and sampling: samples and channels are independent, space is whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, Rule, RuleFunction, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, leading, slots, sums, wanted


def _over_space(space: int) -> RuleFunction:
    """All tensors have the same leading dimensions (samples, if any, and channels) before ``space`` whole ones."""

    def planes(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
        inputs = [leading(s.ndim, space) for s in call.specs]
        return Rule(inputs, [leading(o.ndim, space) for o in outs], kernel=UNLESS_EMPTY)

    return planes


_DIRECTIONS = ("", "_backward")
_SPACE = {
    1: ["max_pool1d"],
    2: [f"{n}{b}" for n in ("avg_pool2d", "max_pool2d_with_indices", "_adaptive_avg_pool2d", "adaptive_max_pool2d")
        for b in _DIRECTIONS] + ["max_unpool2d"],
    3: [f"{n}{b}" for n in ("avg_pool3d", "max_pool3d_with_indices", "_adaptive_avg_pool3d", "adaptive_max_pool3d")
        for b in _DIRECTIONS] + ["max_unpool3d"],
}  # fmt: skip
for _space, _names in _SPACE.items():
    rule(*(f"aten.{n}" for n in _names))(_over_space(_space))


@rule("aten.fractional_max_pool2d", "aten.fractional_max_pool3d")
def fractional_pool(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The random samples are (n, c, 2 or 3); without samples n is one there and has no match in the input."""
    space = int(call.name[-2])
    labels = leading(call.first.ndim, space)
    batched = len(labels) == space + 2
    inputs = slots(call, self=labels, random_samples=(0, 1, None) if batched else (None, 0, None))
    return Rule(inputs, [labels, labels], kernel=UNLESS_EMPTY)


@rule("aten.fractional_max_pool2d_backward", "aten.fractional_max_pool3d_backward")
def fractional_pool_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Gradient, input and indices have the same leading dimensions."""
    return _over_space(int(call.name.removesuffix("d_backward")[-1]))(call, outs)


_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
_UPSAMPLE = (
    *(f"aten.upsample_{k}" for k in _KINDS), *(f"aten._upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *(f"aten._upsample_{k}2d_aa" for k in ("bilinear", "bicubic", "lanczos")),
)  # fmt: skip


@rule(*_UPSAMPLE)
def upsample(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(n, c, *space) to another size of space: linear in the values."""
    n = call.first.ndim
    labels = leading(n, n - 2)
    if "nearest" not in call.name or outs[0].shape[2] % max(call.first.shape[2], 1):
        return Rule([labels], [labels], linear=(frozenset({0}),), kernel=UNLESS_EMPTY)
    # Repeated a whole number of times, every index comes from its own.
    labels = (0, 1, "s", *(None,) * (n - 3))
    units = {"s": call.first.shape[2]} if outs[0].shape[2] != call.first.shape[2] else {}
    return Rule([labels], [labels], linear=(frozenset({0}),), units=units, kernel="upsample_piece")


@rule(*(f"{name}_backward" for name in _UPSAMPLE))
def upsample_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The same; the size of the result, samples and channels included, is an argument."""
    labels = leading(call.first.ndim, call.first.ndim - 2)
    resize = ("input_size", 0)
    return Rule([labels], [labels], linear=(frozenset({0}),), resize=resize, kernel=UNLESS_EMPTY)


@rule("aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten._grid_sampler_2d_cpu_fallback")
def grid_sampler(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Input (n, c, *space), grid (n, *points, 2 or 3): every point is taken on its own."""
    data, grid, result = _sampled(outs[0].ndim)
    return Rule(slots(call, input=data, grid=grid), [result], kernel=UNLESS_EMPTY)


@rule("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward")
def grid_sampler_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The input's gradient is a sum over points, the grid's a sum over channels."""
    data, grid, result = _sampled(call.spec("grad_output").ndim)
    inputs = slots(call, grad_output=result, input=data, grid=grid)
    return Rule(inputs, wanted(call, [data, grid]), reduce=sums(result[1:]), kernel=UNLESS_EMPTY)


def _sampled(ndim: int) -> tuple[Labels, Labels, Labels]:
    points = tuple(("p", d) for d in range(ndim - 2))
    return ("n", "c", *(None,) * len(points)), ("n", *points, None), ("n", "c", *points)
