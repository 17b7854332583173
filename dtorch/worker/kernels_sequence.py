"""Kernels of attention and of recurrent cells."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dtorch.core.pieces import indices
from dtorch.worker.kernels import Context, kernel, stand_in


# -- attention -----------------------------------------------------------------------------------------------------
class _Keys:
    """Keys and values for the piece of the query held here.

    Where all heads of key and value are here but not all query heads, those in use are picked. Where causal rows do not
    start at the first, columns that none of them sees go, and a mask takes the place of the causal one, which torch
    counts from the top left corner: row i sees columns up to i.

    Attributes:
        changes: the operator's arguments to replace.
    """

    def __init__(self, ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        slot = ctx.index("query")
        key, value = args[slot + 1], args[slot + 2]
        spans = ctx.inputs[slot].spans(ctx.position)
        rows, heads = spans[-2], spans[-3:-2]
        self._heads: torch.Tensor | None = None
        self._columns = key.shape[-2]
        self._all = key.shape[-3:-2]
        total, kept = ctx.inputs[slot].shape[-3:-2], ctx.inputs[slot + 1].shape[-3:-2]
        if kept != total and kept != (1,) and self._all == kept and heads != (((0, *total),),):
            self._heads = indices(heads[0], key.device) * kept[0] // total[0]
            key, value = key.index_select(-3, self._heads), value.index_select(-3, self._heads)
        self.changes: dict[str, Any] = {}
        if (len(rows) > 1 or rows[0][0]) and ctx.argument(args, kwargs, "is_causal"):
            last = max(b for _, b in rows)
            key, value = key[..., :last, :], value[..., :last, :]
            seen = indices(rows, key.device).unsqueeze(1) >= torch.arange(key.shape[-2], device=key.device)
            self.changes = {"attn_mask": seen, "is_causal": False}
        self.changes |= {"key": key, "value": value}

    def whole(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of all keys or values: zeros for those not used here."""
        gradient = F.pad(gradient, (0, 0, 0, self._columns - gradient.shape[-2]))
        if self._heads is None:
            return gradient
        shape = (*gradient.shape[:-3], *self._all, *gradient.shape[-2:])
        return gradient.new_zeros(shape).index_add_(-3, self._heads, gradient)


def _to_add(changes: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The fused kernel wants a mask to add in place of a boolean one."""
    seen = changes.get("attn_mask")
    if seen is None:
        return changes
    return {**changes, "attn_mask": torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))}


@kernel
def attention_piece(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """Attention of the heads and rows held here."""
    if ctx.is_empty:
        return ctx.nothing(args[0].device)
    changes = _Keys(ctx, args, kwargs).changes
    fused = ctx.op._schema.name != "aten::scaled_dot_product_attention"
    return ctx.run(args, kwargs, **(_to_add(changes, args[0].dtype) if fused else changes))


@kernel
def attention_backward_piece(ctx: Context, *args: Any, **kwargs: Any) -> Any:
    """Its derivative: gradients of key and value add up over devices with other rows, or other heads of one group."""
    if ctx.is_empty:
        return ctx.nothing(args[0].device)
    keys = _Keys(ctx, args, kwargs)
    query, key, value = ctx.run(args, kwargs, **_to_add(keys.changes, args[0].dtype))
    return query, keys.whole(key), keys.whole(value)


# -- the fused operator on other devices ---------------------------------------------------------------------------
# The client asks for the CPU's fused attention, which gives the same bits as torch there; other devices have none under
# that name, so it is written out for them.
def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Scaled and masked products of query and key in single precision; key has as many heads as query."""
    scores = (query @ key.transpose(-2, -1)).float() * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
        scores = scores.masked_fill_(~seen, float("-inf"))
    return scores if mask is None else scores + mask


def _like_query(query: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return kept.repeat_interleave(query.shape[1] // kept.shape[1], 1)


def _weights(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Softmax by the logarithm of each row's sum; a row that sees nothing weighs nothing."""
    return torch.exp(scores - sums.unsqueeze(-1)).masked_fill(torch.isneginf(sums).unsqueeze(-1), 0)


@stand_in("_scaled_dot_product_flash_attention_for_cpu.default")
def written_attention(
    ctx: Context, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> Any:  # fmt: skip
    """Output (samples, heads, rows, features) and logarithm of sums (samples, heads, rows)."""
    if query.device.type == "cpu":
        return ctx.op(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return write_out_attention(query, key, value, is_causal, attn_mask, scale)


@stand_in("_scaled_dot_product_flash_attention_for_cpu_backward.default")
def written_attention_backward(
    ctx: Context, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, dropout_p: float, is_causal: bool, *, attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Gradients of query, key and value."""
    if query.device.type == "cpu":
        return ctx.op(grad, query, key, value, out, sums, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
    return write_out_attention_backward(grad, query, key, value, out, sums, is_causal, attn_mask, scale)


def write_out_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The fused operator in ordinary ones; key and value may have fewer heads, each for several of the query's."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _scores(query, _like_query(query, key), is_causal, mask, scale)
    sums = scores.logsumexp(-1)
    return _weights(scores, sums).to(value.dtype) @ _like_query(query, value), sums


def write_out_attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    sums: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Its derivative."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    keys, values = _like_query(query, key), _like_query(query, value)
    weights = _weights(_scores(query, keys, is_causal, mask, scale), sums)
    on_weights = (grad @ values.transpose(-2, -1)).float() - (grad.float() * out.float()).sum(-1, keepdim=True)
    on_scores = (weights * on_weights * scale).to(query.dtype)

    def shared(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.reshape(*key.shape[:2], -1, *key.shape[2:]).sum(2)

    on_key = shared(on_scores.transpose(-2, -1) @ query)
    return on_scores @ keys, on_key, shared(weights.to(grad.dtype).transpose(-2, -1) @ grad)


# -- recurrent cells -----------------------------------------------------------------------------------------------
# torch chooses these operators for every device but the CPU, which has no kernel for them. The formulas are those of
# its CUDA kernels (aten/src/ATen/native/cuda/RNN.cu), in the order in which its CPU code rounds.
def _biased(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


@stand_in("_thnn_fused_lstm_cell.default")
def lstm_cell(
    ctx: Context, input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor,
    input_bias: torch.Tensor | None = None, hidden_bias: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Hidden state, cell state, and the four gates for the derivative."""
    if cx.is_cuda:
        return ctx.op(input_gates, hidden_gates, cx, input_bias, hidden_bias)
    gates = _biased(hidden_gates, hidden_bias) + _biased(input_gates, input_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = (f * cx).add_(i * g)
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


@stand_in("_thnn_fused_lstm_cell_backward_impl.default")
def lstm_cell_backward(
    ctx: Context, grad_hy: torch.Tensor | None, grad_cy: torch.Tensor | None, cx: torch.Tensor, cy: torch.Tensor,
    workspace: torch.Tensor, has_bias: bool,
) -> Any:  # fmt: skip
    """Gradients of the gates, of the cell state and of the bias."""
    if cx.is_cuda or (grad_hy is None and grad_cy is None):
        return ctx.op(grad_hy, grad_cy, cx, cy, workspace, has_bias)
    i, f, g, o = workspace.chunk(4, 1)
    squashed = cy.tanh()
    cell = torch.zeros_like(cy) if grad_cy is None else grad_cy
    out = torch.zeros_like(cy)
    if grad_hy is not None:
        cell = cell + grad_hy * o * (1 - squashed * squashed)
        out = grad_hy * squashed * o * (1 - o)
    parts = [cell * g * i * (1 - i), cell * cx * f * (1 - f), cell * i * (1 - g * g), out]
    gates = torch.cat(parts, 1)
    return gates, cell * f, gates.sum(0) if has_bias else None


@stand_in("_thnn_fused_gru_cell.default")
def gru_cell(
    ctx: Context, input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor,
    input_bias: torch.Tensor | None = None, hidden_bias: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Hidden state, and for the derivative: reset, update and new gates, old state, the new gate's hidden part."""
    if hx.is_cuda:
        return ctx.op(input_gates, hidden_gates, hx, input_bias, hidden_bias)
    a, b, c = _biased(input_gates, input_bias).chunk(3, 1)
    x, y, hidden = _biased(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (x + a).sigmoid(), (y + b).sigmoid()
    new = (c + hidden * reset).tanh()
    return (hx - new).mul_(update).add_(new), torch.cat([reset, update, new, hx, hidden], 1)


@stand_in("_thnn_fused_gru_cell_backward.default")
def gru_cell_backward(ctx: Context, grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    """Gradients of both gates, of the hidden state and of both biases."""
    if grad.is_cuda:
        return ctx.op(grad, workspace, has_bias)
    reset, update, new, hx, hidden = workspace.chunk(5, 1)
    on_update = grad * (hx - new) * (1 - update) * update
    on_new = grad * (1 - update) * (1 - new * new)
    on_reset = on_new * hidden * (1 - reset) * reset
    from_input = torch.cat([on_reset, on_update, on_new], 1)
    from_hidden = torch.cat([on_reset, on_update, on_new * reset], 1)
    biases = (from_input.sum(0), from_hidden.sum(0)) if has_bias else (None, None)
    return from_input, from_hidden, grad * update, *biases
