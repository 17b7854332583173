"""Operators that work along one dimension and leave the others alone: sorts, running sums, flips, searches, counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, Rule, replicated, rule
from dtorch.planner.rules.named import UNLESS_EMPTY

_FIRST = (frozenset({0}),)


# The label of a dimension along which tensors stand end to end.
LINE = "line"


def line_along(dim: int, ndim: int) -> Labels:
    """A label for each dimension, and that of the line for one."""
    return tuple(LINE if d == dim else d for d in range(ndim))


def whole_along(dims: Iterable[int], ndim: int) -> Labels:
    """A label for each dimension but ``dims``, which may be negative."""
    used = {d % ndim for d in dims} if ndim else set()
    return tuple(None if d in used else d for d in range(ndim))


@rule(
    "aten.sort", "aten.topk", "aten.cummax", "aten.cummin", "aten.cumprod", "aten.logcumsumexp", "aten._logcumsumexp",
    "aten._cummax_helper", "aten._cummin_helper",
)  # fmt: skip
def along(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each line along ``dim`` by itself; all tensors have it in the same place."""
    dims = [call["dim"]] if call["dim"] is not None else []
    labels = [whole_along(dims, s.ndim) for s in call.specs]
    return Rule(labels, [labels[0]] * len(outs))


@rule("aten.cumsum", "aten._cumsum")
def cumsum(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Running sums; those of terms add up."""
    labels = whole_along([call["dim"]], call.first.ndim)
    return Rule([labels], [labels], linear=_FIRST if outs[0].dtype == call.first.dtype else ())


@rule("aten.flip", "aten.roll", "aten.rot90")
def moved_around(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Elements change places along these dimensions; without any, roll goes through the whole tensor."""
    n = call.first.ndim
    everything = call.name == "aten.roll" and not call["dims"]
    labels = whole_along(range(n) if everything else call["dims"], n)
    return Rule([labels], [labels], linear=_FIRST)


@rule("aten.renorm")
def renorm(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each slice along ``dim`` is scaled by its own norm: all other dimensions are whole."""
    n = call.first.ndim
    labels = tuple(d if d == call["dim"] % n else None for d in range(n))
    return Rule([labels], [labels])


# -- searching -----------------------------------------------------------------------------------------------------
@rule("aten.searchsorted", "aten.bucketize")
def search(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each value is looked up by itself, in the row of boundaries with its own leading position."""
    values = call.slots.get("self")
    edges = call.spec("boundaries" if call.name == "aten.bucketize" else "sorted_sequence")
    if not isinstance(values, int):
        return replicated(call, outs)
    labels = tuple(range(call.specs[values].ndim))
    rows = (*labels[: edges.ndim - 1], None) if edges.ndim > 1 else (None,) * edges.ndim
    inputs: list[Labels] = [rows] * len(call.specs)  # the edges, and the order in which to read them
    inputs[values] = labels
    return Rule(inputs, [labels])


@rule("aten.isin")
def isin(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each element by itself against all test elements."""
    elements = call.slots.get("elements")
    inputs: list[Labels] = [(None,) * s.ndim for s in call.specs]
    if not isinstance(elements, int):
        return Rule(inputs, [(None,) * outs[0].ndim])
    inputs[elements] = tuple(range(call.specs[elements].ndim))
    return Rule(inputs, [inputs[elements]])


# -- counting ------------------------------------------------------------------------------------------------------
@rule("aten.histc")
def histc(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Counts add up; but where the range is that of the values, every device must know them all."""
    if call["min"] == call["max"]:
        return replicated(call, outs)
    labels = tuple(range(call.first.ndim))
    return Rule([labels], [(None,)], reduce=dict.fromkeys(labels, "sum"))


@rule(
    "aten.histogram", "aten._histogramdd_bin_edges", "aten._histogramdd_from_bin_cts",
    "aten._histogramdd_from_bin_tensors", "aten.bincount",
)  # fmt: skip
def histogram(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The range, or the number of bins, comes from all the values."""
    return replicated(call, outs)


@rule("aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive")
def unique(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every value is compared with every other."""
    return replicated(call, outs)


# -- segments ------------------------------------------------------------------------------------------------------
@rule("aten.segment_reduce")
def segment_reduce(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Reduces runs along ``axis``; leading dimensions have their own runs, trailing ones share them."""
    axis = call["axis"] % call.first.ndim
    labels = whole_along([axis], call.first.ndim)
    lengths = (*labels[:axis], None)
    return Rule([labels, *[lengths] * (len(call.specs) - 1)], [labels], kernel=UNLESS_EMPTY)


@rule("aten._segment_reduce_backward")
def segment_reduce_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Gradient, result and data have the runs' dimension in one place, with different lengths."""
    axis = call["axis"] % call.first.ndim
    labels = whole_along([axis], call.first.ndim)
    lengths = (*labels[:axis], None)
    return Rule([labels] * 3 + [lengths] * (len(call.specs) - 3), [labels], kernel=UNLESS_EMPTY)
