"""Matrix products: a cut inner dimension leaves the result Partial."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, NoRule, Rule, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, slots, sums
from dtorch.planner.rules.pointwise import broadcast_labels

_SUM = {"k": "sum"}
_EITHER = (frozenset({0}), frozenset({1}))


@rule("aten.mm")
def mm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(m, k) @ (k, n)."""
    return Rule([("m", "k"), ("k", "n")], [("m", "n")], reduce=_SUM, linear=_EITHER)


@rule("aten.bmm")
def bmm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(b, m, k) @ (b, k, n)."""
    return Rule([("b", "m", "k"), ("b", "k", "n")], [("b", "m", "n")], reduce=_SUM, linear=_EITHER)


@rule("aten.mv")
def mv(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(m, k) @ (k,)."""
    return Rule([("m", "k"), ("k",)], [("m",)], reduce=_SUM, linear=_EITHER)


@rule("aten.dot", "aten.vdot")
def dot(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(k,) @ (k,)."""
    return Rule([("k",), ("k",)], [()], reduce=_SUM, linear=_EITHER)


@rule("aten.addmm", "aten.baddbmm", "aten.addmv", "aten.addr")
def addmm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """beta * input + alpha * product; on a cut inner dimension only the first device adds the input."""
    forms: dict[str, list[Labels]] = {
        "aten.addmm": [("m", "k"), ("k", "n")],
        "aten.baddbmm": [("b", "m", "k"), ("b", "k", "n")],
        "aten.addmv": [("m", "k"), ("k",)],
        "aten.addr": [("m",), ("n",)],
    }
    inner = forms[call.name]
    out = tuple(x for x in dict.fromkeys((*inner[0], *inner[1])) if x != "k")
    shape, target = call.first.shape, tuple(outs[0].shape)
    shift = len(target) - len(shape)
    bias = tuple(out[d + shift] if n == target[d + shift] else None for d, n in enumerate(shape))
    # On a piece without rows torch's addmv gives back a broadcast input as it is.
    kernel = UNLESS_EMPTY if call.name == "aten.addmv" else None
    return Rule([bias, *inner], [out], reduce=_SUM, kernels={"k": "add_once"}, kernel=kernel)


@rule("aten.linear")
def linear(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(..., k) @ (n, k)^T + bias; on a cut inner dimension only the first device adds the bias."""
    if call.specs[1].ndim != 2:
        raise NoRule("aten.linear with a weight of one dimension")
    batch = tuple(range(call.first.ndim - 1))
    inputs: list[Labels] = [(*batch, "k"), ("n", "k")]
    if len(call.specs) > 2:
        inputs.append(("n",) if call.specs[2].ndim else ())
        return Rule(inputs, [(*batch, "n")], reduce=_SUM, kernels={"k": "add_once"})
    return Rule(inputs, [(*batch, "n")], reduce=_SUM, linear=_EITHER)


@rule("aten.linear_backward")
def linear_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The gradient of a weight (n, k) alone: (..., k) and (..., n), summed over all the dimensions before."""
    if list(call["output_mask"]) != [False, True, False]:
        raise NoRule("aten.linear_backward for other gradients")
    batch = tuple(range(call.first.ndim - 1))
    inputs = slots(call, self=(*batch, "k"), grad_output=(*batch, "n"), weight=("n", "k"))
    return Rule(inputs, [("n", "k")], reduce=sums(batch), unused=frozenset({call.slots["weight"]}))


@rule("aten.matmul")
def matmul(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Vectors, matrices and broadcast batches of matrices."""
    a, b = call.specs
    out = tuple(outs[0].shape)
    tail_a: Labels = ("k",) if a.ndim == 1 else ("m", "k")
    tail_b: Labels = ("k",) if b.ndim == 1 else ("k", "n")
    tail = tuple(x for x in (*tail_a, *tail_b) if x != "k")
    batch = out[: len(out) - len(tail)]
    left = broadcast_labels(a.shape[: max(a.ndim - 2, 0)], batch)
    right = broadcast_labels(b.shape[: max(b.ndim - 2, 0)], batch)
    labels = broadcast_labels(batch, batch)
    return Rule([left + tail_a, right + tail_b], [labels + tail], reduce=_SUM, linear=_EITHER)
