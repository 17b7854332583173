"""Results of operators for which torch has no meta implementation."""

from __future__ import annotations

from collections.abc import Callable
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
