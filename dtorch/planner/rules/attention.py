"""Attention, and the product of three tensors behind bilinear layers.

Shapes: query (*batch, heads, rows, features), key (*batch, heads, columns, features), value (*batch, heads, columns,
values). Batch and heads are independent, rows are when every device has all keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.core.spec import TensorSpec
from dtorch.planner.call import Call
from dtorch.planner.rule import Label, Labels, NoRule, Rule, replicated, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, leading, slots, sums
from dtorch.planner.rules.pointwise import broadcast_labels


class _Sides:
    """Labels of query, key, value and mask, and of what has a row for each row of the query.

    Where several query heads share one of key and value, and the latter's heads cannot be cut as the former's are,
    key and value stay whole and a device picks the heads it needs (``kernel`` knows).
    """

    def __init__(self, call: Call, shape: Sequence[int], values: Label) -> None:
        query, key, value = (call.spec(x) for x in ("query", "key", "value"))
        batch = tuple(shape[:-2])
        self.units: dict[Label, int] = {}
        self._parts = _head_parts(query)
        self.batch = broadcast_labels(batch, batch)
        self.query: Labels = (*broadcast_labels(query.shape[:-2], batch), "row", None)
        self.result: Labels = (*self.batch, "row", values)
        self.key: Labels = (*self._shared(query, key, batch), "column", None)
        self.value: Labels = (*self._shared(query, value, batch), "column", values)
        self.mask: Labels = ()
        if "attn_mask" in call.slots:
            mask = call.spec("attn_mask").shape
            rows = "row" if len(mask) > 1 and mask[-2] == query.shape[-2] else None
            self.mask = (*broadcast_labels(mask[:-2], batch), rows, None)[-len(mask) :]

    def _shared(self, query: TensorSpec, kept: TensorSpec, batch: tuple[int, ...]) -> Labels:
        """Batch and head labels of key or value."""
        labels = broadcast_labels(kept.shape[:-2], batch)
        if min(kept.ndim, query.ndim) < 3 or kept.shape[-3] in (1, query.shape[-3]) or kept.shape[-3] % self._parts:
            return labels
        heads = kept.shape[-3]
        self.units[self.batch[-1]] = math.gcd(heads, self.units.get(self.batch[-1], 0))
        return (*labels[:-1], self.batch[-1])

    def context(self, ring: str) -> dict[str, Any]:
        """What the rule says of context parallelism, see ``planner.context``."""
        four = len(self.query) == 4
        return {
            "sequence": ("row", "column"),
            "heads": self.batch[-1] if four else None,
            "ring": ring if four else None,
        }

    def inputs(self, call: Call) -> list[Labels]:
        """Labels of the tensors of a forward call."""
        return slots(call, query=self.query, key=self.key, value=self.value, attn_mask=self.mask)


def _head_parts(query: TensorSpec) -> int:
    """Into how many parts the heads will be cut: as they are, and by axes that exchange rows for heads."""
    parts = query.shards_of(query.ndim - 3) if query.ndim > 2 else 1
    for axis, p in enumerate(query.placements):
        if query.mesh.kind(axis) == "ulysses_cp" and p.is_shard(query.ndim - 2):
            parts *= query.mesh.shape[axis]
    return parts


@rule("aten.scaled_dot_product_attention")
def attention(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """One operator for all of it; dropout draws for the whole tensor, so it needs it."""
    if call["dropout_p"]:
        whole = replicated(call, outs)
        return Rule(whole.inputs, whole.outputs, kernel="random")
    side = _Sides(call, tuple(outs[0].shape), "value")
    return Rule(
        side.inputs(call), [side.result], units=side.units, kernel="attention_piece", **side.context("ring_attention")
    )


@rule("aten._scaled_dot_product_flash_attention_for_cpu")
def flash_attention(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """What training uses, without dropout: also gives the logarithm of each row's sum."""
    if call["dropout_p"]:
        raise NoRule("flash attention with dropout")
    side = _Sides(call, tuple(outs[0].shape), None)
    outputs = [side.result, (*side.batch, "row")]
    return Rule(
        side.inputs(call), outputs, units=side.units, kernel="attention_piece", **side.context("ring_attention")
    )


@rule("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def flash_attention_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Gradients of key and value are sums over the rows, and over the query heads that share them."""
    side = _Sides(call, call.spec("grad_out").shape, None)
    inputs = slots(
        call, query=side.query, key=side.key, value=side.value, attn_mask=side.mask, grad_out=side.result,
        out=side.result, logsumexp=(*side.batch, "row"),
    )  # fmt: skip
    outputs = [side.query, side.key, side.value]
    return Rule(
        inputs, outputs, reduce=sums(side.result), units=side.units, kernel="attention_backward_piece",
        **side.context("ring_attention_backward"),
    )  # fmt: skip


@rule("aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention")
def encoder_layer(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A whole layer for inference, (samples, rows, features): only samples are independent."""
    labels = leading(3, 2)
    mask: Labels = ()
    if "mask" in call.slots:
        spec = call.spec("mask")
        each = spec.ndim > 2 or call["mask_type"] == 1  # a row of padding, or a whole mask, for each sample
        mask = leading(spec.ndim, spec.ndim - each)
    data = {n: labels for n in ("src", "query", "key", "value") if n in call.slots}
    outputs = [leading(o.ndim, o.ndim - 1) for o in outs]
    return Rule(slots(call, mask=mask, **data), outputs, kernel=UNLESS_EMPTY)


@rule("aten._trilinear")
def trilinear(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Three tensors, unsqueezed at the dimensions named, are multiplied and summed over others."""
    expand = [set(call[f"expand{k}"]) for k in (1, 2, 3)]
    total = call.first.ndim + len(expand[0])
    places = [[d for d in range(total) if d not in e] for e in expand]
    sizes = [1] * total
    for dims, spec in zip(places, call.specs, strict=True):
        for d, n in zip(dims, spec.shape, strict=True):
            sizes[d] = max(sizes[d], n)
    # A tensor of size one is stretched there.
    inputs = [
        tuple(d if n == sizes[d] else None for d, n in zip(dims, spec.shape, strict=True))
        for dims, spec in zip(places, call.specs, strict=True)
    ]
    gone = {d % total for d in call["sumdim"]}
    output = tuple(d if any(d in labels for labels in inputs) else None for d in range(total) if d not in gone)
    return Rule(inputs, [output], reduce=sums(tuple(gone)), kernel=UNLESS_EMPTY)
