"""Results of operators for which torch has no meta implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.planner.call import Call

Shapes = Callable[[Call], Any]
SHAPES: dict[str, Shapes] = {}


def shapes(*names: str) -> Callable[[Shapes], Shapes]:
    """Register a function from a call to its results on the meta device, or to ``None`` when only running it tells."""

    def register(f: Shapes) -> Shapes:
        for name in names:
            SHAPES[name] = f
        return f

    return register


def _like(call: Call, name: str, *shape: int) -> torch.Tensor:
    spec = call.spec(name)
    return torch.empty(shape or spec.shape, dtype=spec.dtype, device="meta")


@shapes(
    "aten.multi_margin_loss_backward", "aten.multilabel_margin_loss_backward", "aten.fractional_max_pool3d_backward",
)  # fmt: skip
def as_input(call: Call) -> Any:
    """The gradient has the shape of the input."""
    return _like(call, "self")


def has_fused_attention(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], mask: Sequence[int] | None, shared: bool
) -> bool:
    """Whether the fused kernel takes these shapes; it does not check them. torch's own conditions for the CPU, and the
    kernel takes heads of key and value that several query heads share as well."""
    if not len(query) == len(key) == len(value) == 4 or 0 in (query[2], key[2]):
        return False
    (samples, heads, rows, features), columns = query, key[2]
    if tuple(key) != tuple(value) or key[0] != samples or key[3] != features:
        return False
    if key[1] != heads and (not shared or heads % key[1]):
        return False
    if mask is None:
        return True
    fits = all(n in (1, m) for n, m in zip(reversed(mask), (columns, rows, heads, samples), strict=False))
    return len(mask) in (2, 4) and fits


@shapes("aten.scaled_dot_product_attention")
def attention(call: Call) -> Any:
    """The fused kernel's result lies in memory as the query does. Others are left to torch, which has no implementation
    for the meta device but the parts of the written-out form: that takes a millisecond."""
    query, key, value = (call.spec(name) for name in ("query", "key", "value"))
    mask = call.spec("attn_mask") if "attn_mask" in call.slots else None
    same = query.dtype == key.dtype == value.dtype and (mask is None or mask.dtype in (torch.bool, query.dtype))
    shapes_of = (query.shape, key.shape, value.shape, None if mask is None else mask.shape)
    if not same or call["dropout_p"] or not query.dtype.is_floating_point or (mask is not None and call["is_causal"]):
        return None
    if not has_fused_attention(*shapes_of, bool(call["enable_gqa"])):
        return None
    device = "cpu" if 1 in query.shape else "meta"  # which would invent other strides for dimensions of size one
    return torch.empty_like(torch.empty_strided(query.shape, query.stride, dtype=query.dtype, device=device))


@shapes("aten.linear_backward")
def linear_backward(call: Call) -> Any:
    """Gradients of input, weight and bias, as far as asked for; of a weight in row-major memory."""
    weight = call.spec("weight")
    made = _like(call, "self"), _like(call, "weight"), _like(call, "weight", weight.shape[0])
    return tuple(t if asked else None for t, asked in zip(made, call["output_mask"], strict=True))


@shapes("aten._ctc_loss")
def ctc_loss(call: Call) -> Any:
    """Losses (n) and alphas (n, time, 2 * longest target + 1).

    Where the lengths are tensors, alphas have room for the width of the targets; end to end targets do not tell it.
    """
    time, n, _ = call.spec("log_probs").shape
    if isinstance(call["target_lengths"], list | tuple):
        longest = max(call["target_lengths"], default=0)
    elif call.spec("targets").ndim == 2:
        longest = call.spec("targets").shape[1]
    else:
        return None
    return _like(call, "log_probs", n), _like(call, "log_probs", n, time, 2 * longest + 1)


@shapes("aten._ctc_loss_backward")
def ctc_loss_backward(call: Call) -> Any:
    """The gradient has the shape of the log-probabilities."""
    return _like(call, "log_probs")


@shapes("aten._thnn_fused_gru_cell")
def gru_cell(call: Call) -> Any:
    """New hidden state (n, hidden) and the workspace of the derivative (n, 5 * hidden)."""
    n, hidden = call.spec("hx").shape
    return _like(call, "hx"), _like(call, "hx", n, 5 * hidden)


@shapes("aten._thnn_fused_gru_cell_backward")
def gru_cell_backward(call: Call) -> Any:
    """Gradients of both gates, of the hidden state and, where there are biases, of those."""
    n, hidden = call.spec("grad_hy").shape
    gates = [_like(call, "grad_hy", n, 3 * hidden) for _ in range(2)]
    biases = [_like(call, "grad_hy", 3 * hidden) for _ in range(2)] if call["has_bias"] else [None, None]
    return (*gates, _like(call, "grad_hy"), *biases)
