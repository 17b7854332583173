"""Losses. A mean over pieces of different sizes is a sum of shares: kernels weigh each device's mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, NoRule, Rule, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, slots, sums
from dtorch.planner.rules.pointwise import broadcast_labels

# torch's numbers for ``reduction=``.
_NONE, _MEAN = 0, 1


def _reduced(call: Call, inputs: list[Labels], labels: Labels, more: Sequence[Labels] = ()) -> Rule:
    """One number for everything, or one for each of the labels when the loss is not reduced; then further results."""
    kernel = "mean_loss_piece" if call["reduction"] == _MEAN else UNLESS_EMPTY
    if call["reduction"] == _NONE:
        return Rule(inputs, [labels, *more], kernel=kernel)
    return Rule(inputs, [(), *more], reduce=sums(labels), kernel=kernel)


def _gradient(call: Call, inputs: list[Labels], result: Labels) -> Rule:
    kernel = "mean_loss_backward_piece" if call["reduction"] == _MEAN else UNLESS_EMPTY
    return Rule(inputs, [result], linear=(frozenset({call.slots["grad_output"]}),), kernel=kernel)


@rule(
    "aten.mse_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.soft_margin_loss", "aten.binary_cross_entropy",
    "aten.binary_cross_entropy_with_logits",
)  # fmt: skip
def elementwise(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Element by element, then perhaps added up or averaged."""
    shape = call.spec("self").shape
    if torch.broadcast_shapes(*(s.shape for s in call.specs)) != shape:
        raise NoRule(f"{call.name}: the input is broadcast")
    return _reduced(call, [broadcast_labels(s.shape, shape) for s in call.specs], broadcast_labels(shape, shape))


@rule(
    "aten.mse_loss_backward", "aten.smooth_l1_loss_backward", "aten.huber_loss_backward",
    "aten.soft_margin_loss_backward", "aten.binary_cross_entropy_backward",
)  # fmt: skip
def elementwise_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The same with the gradient of the loss, which is one number unless the loss is not reduced."""
    shape = call.spec("self").shape
    if torch.broadcast_shapes(*(s.shape for s in call.specs)) != shape:
        raise NoRule(f"{call.name}: the input is broadcast")
    return _gradient(call, [broadcast_labels(s.shape, shape) for s in call.specs], broadcast_labels(shape, shape))


@rule("aten.multi_margin_loss", "aten.multilabel_margin_loss_forward")
def margin(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Input (n, classes), target (n) or (n, classes); without samples nothing is independent."""
    samples: Labels = ("n",) if call.first.ndim > 1 else ()
    inputs = slots(call, self=(*samples, None), target=(*samples, *(None,) * (call.spec("target").ndim - len(samples))))
    return _reduced(call, inputs, samples, [(*samples, None)] * (len(outs) - 1))


@rule("aten.multi_margin_loss_backward", "aten.multilabel_margin_loss_backward")
def margin_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The same."""
    data: Labels = ("n", None) if call.spec("self").ndim > 1 else (None,)
    target = data[: call.spec("target").ndim]
    grad = data[: call.spec("grad_output").ndim]
    return _gradient(call, slots(call, grad_output=grad, self=data, target=target, is_target=data), data)


_CLASSES = frozenset({"c"})


def _classified(call: Call) -> tuple[Labels, Labels]:
    """Labels of the input (n, classes, *space) or (classes) and of the target (n, *space) or ()."""
    n = call.spec("self").ndim
    if n == 1:
        return ("c",), ()
    space = tuple(("s", d) for d in range(n - 2))
    return ("n", "c", *space), ("n", *space)


@rule("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A mean divides by the weights of all targets, so all devices then know targets and weights; they are small."""
    data, target = _classified(call)
    if call["reduction"] == _NONE:
        inputs = slots(call, self=data, target=target, weight=("c",))
        return Rule(
            inputs, [target, ()], reduce=sums(("c",)), whole=frozenset({1}), kernel="nll_loss_piece", in_order=_CLASSES
        )
    inputs = slots(call, self=data, target=target, weight=("c",))
    if call["reduction"] == _MEAN:
        inputs = slots(call, self=data)
    return Rule(inputs, [(), ()], reduce=sums(data), kernel="nll_loss_piece", in_order=_CLASSES)


@rule("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The total weight of a mean is an argument, so every element is independent."""
    data, target = _classified(call)
    grad = target if call["reduction"] == _NONE else ()
    inputs = slots(call, grad_output=grad, self=data, target=target, weight=("c",), total_weight=())
    return Rule(inputs, [data], kernel="nll_loss_backward_piece", in_order=_CLASSES)


@rule("torch_nn._linear_cross_entropy_batch_chunked_no_reduction", "torch_nn._linear_cross_entropy_batch_chunked")
def linear_cross_entropy(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A linear layer (classes, features) and its cross entropy, a loss and perhaps gradients at once; as nll_loss."""
    samples: Labels = ("n", None)
    if len(outs) == 1:
        return Rule(slots(call, input=samples, target=("n",)), [("n",)], kernel=UNLESS_EMPTY)
    inputs = slots(call, input=samples, target=("n",))
    if call["reduction"] == "mean":
        inputs = slots(call, input=samples)
    gradient = samples if call["compute_input_grad"] else (None, None)
    outputs: list[Labels] = [(), gradient, (None, None), (None,)]
    return Rule(inputs, outputs, reduce=sums(("n",)), kernel="linear_cross_entropy_piece")


@rule("aten._ctc_loss", "aten._ctc_loss_backward")
def ctc_loss(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Log-probabilities (time, n, classes), targets (n, length) or end to end: samples are independent."""
    end_to_end = call.spec("targets").ndim == 1
    data: Labels = (None, "n", None)
    inputs = slots(
        call, log_probs=data, targets=(None,) if end_to_end else ("n", None), grad=("n",), neg_log_likelihood=("n",),
        log_alpha=("n", None, None), input_lengths=("n",), target_lengths=("n",),
    )  # fmt: skip
    outputs: list[Labels] = [("n",), ("n", None, None)] if len(outs) == 2 else [data]
    return Rule(inputs, outputs, kernel="ctc_loss_piece")


@rule("aten._pdist_forward", "aten._pdist_backward")
def pdist(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every pair of rows; the derivative treats columns one by one."""
    if call.name == "aten._pdist_forward":
        return Rule([(None, None)], [(None,)])
    return Rule(slots(call, self=(None, "m")), [(None, "m")], kernel=UNLESS_EMPTY)
