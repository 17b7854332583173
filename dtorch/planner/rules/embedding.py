"""Looking rows up in a table: embeddings and bags of them, with their derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Rule, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, slots, sums


@rule("aten.embedding")
def embedding(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Where the vocabulary is cut, each device looks up the rows it has and leaves zeros for the others."""
    where = tuple(range(call.spec("indices").ndim))
    inputs = slots(call, weight=("v", "h"), indices=where)
    return Rule(inputs, [(*where, "h")], reduce=sums(("v",)), kernels={"v": "embedding_piece"})


@rule("aten.embedding_dense_backward")
def embedding_dense_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each row's gradient is a sum over the places where it was looked up; scaling by frequency must see them all."""
    scaled = call["scale_grad_by_freq"]
    where = tuple(None if scaled else d for d in range(call.spec("indices").ndim))
    inputs = slots(call, grad_output=(*where, "h"), indices=where)
    linear = (frozenset({call.slots["grad_output"]}),)
    return Rule(inputs, [(None, "h")], reduce=sums(where), linear=linear, kernel=UNLESS_EMPTY)


@rule("aten.embedding_renorm")
def embedding_renorm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Rows that are too long are shortened in place; rows are whole, indices known everywhere."""
    return Rule(slots(call, self=("v", None)), [("v", None)], kernel="embedding_renorm_piece")


_MAX = 2  # the mode of bags; 0 adds up, 1 averages


@rule("aten._embedding_bag", "aten._embedding_bag_forward_only")
def embedding_bag(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Bags add up the rows that a device has of a cut vocabulary; which index is in which bag is known everywhere."""
    largest = call["mode"] == _MAX
    inputs = slots(call, weight=(None if largest else "v", "h"))
    outputs = [(None, "h"), (None,), (None,), (None, "h") if largest else (None,)]
    whole = frozenset({1, 2} if largest else {1, 2, 3})
    return Rule(inputs, outputs, reduce=sums(("v",)), whole=whole, kernel="embedding_bag_piece")


@rule("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward")
def embedding_bag_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Columns are independent."""
    inputs = slots(call, grad=(None, "h"), maximum_indices=(None, "h") if call["mode"] == _MAX else (None,))
    return Rule(inputs, [(None, "h")], kernel=UNLESS_EMPTY)


@rule("aten._embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Products of gradient and row, summed over columns."""
    inputs = slots(call, grad=(None, "h"), weight=(None, "h"))
    return Rule(inputs, [(None,)], reduce=sums(("h",)), kernel=UNLESS_EMPTY)
