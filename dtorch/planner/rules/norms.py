"""Normalisations: softmax, layer, root mean square, group and batch norm; gated linear units, cut as softmax is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, Rule, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, leading, slots, sums, wanted


@rule(
    "aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten._softmax_backward_data",
    "aten._log_softmax_backward_data",
)  # fmt: skip
def softmax(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The dimension whose sum is one is whole."""
    n = call.first.ndim
    labels = tuple(None if i == call["dim"] % n else i for i in range(n)) if n else ()
    return Rule([labels] * len(call.specs), [labels])


@rule("aten.glu", "aten.glu_backward")
def glu(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """One half of a dimension gates the other: it is whole."""
    n = call.first.ndim
    labels = tuple(None if i == call["dim"] % n else i for i in range(n))
    return Rule([labels] * len(call.specs), [labels])


@rule("aten.native_layer_norm", "aten.layer_norm", "aten._fused_rms_norm", "aten.rms_norm")
def layer_norm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The normalised dimensions are whole, statistics have size one there; those before them are independent."""
    labels = leading(call.first.ndim, len(call["normalized_shape"]))
    return Rule(slots(call, input=labels), [labels] * len(outs), kernel=UNLESS_EMPTY)


@rule("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward")
def layer_norm_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Weight and bias gradients are sums over the independent dimensions."""
    whole = len(call["normalized_shape"])
    labels = leading(call.first.ndim, whole)
    inputs = slots(call, grad_out=labels, input=labels, mean=labels, rstd=labels)
    outputs = wanted(call, [labels, (None,) * whole, (None,) * whole][: len(call["output_mask"])])
    return Rule(inputs, outputs, reduce=sums(labels), kernel=UNLESS_EMPTY)


@rule("aten.native_group_norm")
def group_norm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Samples are independent, and channels between groups; weight and bias are cut with the channels."""
    labels: Labels = ("n", "c", *(None,) * (call.first.ndim - 2))
    inputs = slots(call, input=labels, weight=("c",), bias=("c",))
    outputs = [labels, ("n", "c"), ("n", "c")]
    return Rule(inputs, outputs, units={"c": call["group"]}, kernel="group_norm_piece")


@rule("aten.native_group_norm_backward")
def group_norm_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Weight and bias gradients are sums over samples."""
    labels: Labels = ("n", "c", *(None,) * (call.first.ndim - 2))
    inputs = slots(call, grad_out=labels, input=labels, mean=("n", "c"), rstd=("n", "c"), weight=("c",))
    outputs = wanted(call, [labels, ("c",), ("c",)])
    return Rule(inputs, outputs, reduce=sums(("n",)), units={"c": call["group"]}, kernel="group_norm_piece")


_CHANNEL: Labels = ("c",)
_WITHOUT_TRAINING = ("aten._native_batch_norm_legit_no_training", "aten._batch_norm_no_update")


@rule(
    "aten._native_batch_norm_legit", "aten._native_batch_norm_legit_no_training", "aten._batch_norm_with_update",
    "aten._native_batch_norm_legit_functional", "aten._batch_norm_with_update_functional", "aten._batch_norm_no_update",
)  # fmt: skip
def batch_norm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Channels are independent. With running statistics all other dimensions are too; in training they are whole."""
    training = call.get("training", call.name not in _WITHOUT_TRAINING)
    rest = call.first.ndim - 2
    labels: Labels = (None, "c", *(None,) * rest) if training else ("n", "c", *range(rest))
    inputs = slots(call, input=labels, **dict.fromkeys(("weight", "bias", "running_mean", "running_var"), _CHANNEL))
    # Results without a size of one for each channel are empty: statistics not saved, space reserved for other devices.
    channels = call.first.shape[1]
    saved = [i for i, o in enumerate(outs) if i and training and tuple(o.shape) == (channels,)]
    outputs = [_CHANNEL if i in saved else (None,) * o.ndim for i, o in enumerate(outs)]
    whole = frozenset(i for i in range(1, len(outs)) if i not in saved)
    return Rule(inputs, [labels, *outputs[1:]], whole=whole, kernel=UNLESS_EMPTY)


@rule("aten.native_batch_norm_backward", "aten.batch_norm_backward")
def batch_norm_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """As forward; weight and bias gradients are sums over all that is not a channel."""
    training = call["train"] if call.name == "aten.native_batch_norm_backward" else call["update"]
    rest = call.first.ndim - 2
    labels: Labels = (None, "c", *(None,) * rest) if training else ("n", "c", *range(rest))
    per_channel = dict.fromkeys(("weight", "running_mean", "running_var"), _CHANNEL)
    for name in ("save_mean", "save_invstd", "save_var"):
        if name in call.slots and call.spec(name).numel:
            per_channel[name] = _CHANNEL
    inputs = slots(call, grad_out=labels, input=labels, **per_channel)
    reduce = sums(tuple(x for x in labels if x != "c"))
    return Rule(inputs, wanted(call, [labels, _CHANNEL, _CHANNEL]), reduce=reduce, kernel=UNLESS_EMPTY)
