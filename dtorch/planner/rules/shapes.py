"""Joining, repeating, placing into larger tensors, and new tensors like old ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from dtorch.core.spec import dense_strides
from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, Rule, replicated, rule
from dtorch.planner.rules.along import LINE, line_along, whole_along

_FIRST = (frozenset({0}),)
_BOTH = (frozenset({0, 1}),)


# -- joining and repeating -----------------------------------------------------------------------------------------
@rule("aten.cat")
def cat(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """End to end along ``dim``; torch lets empty vectors stand among the tensors."""
    n = outs[0].ndim
    d = call["dim"] % n
    labels = line_along(d, n)
    inputs = [labels if s.ndim == n else (None,) * s.ndim for s in call.specs]
    ends = pairwise(accumulate((s.shape[d] if s.ndim == n else 0 for s in call.specs), initial=0))
    stretches = {i: stretch for i, stretch in enumerate(ends) if inputs[i] is labels}
    linear = (frozenset(range(len(inputs))),)
    return Rule(inputs, [labels], linear=linear, joined=LINE, stretches=(stretches, {0: (0, outs[0].shape[d])}))


@rule("aten.stack")
def stack(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Side by side along a new dimension."""
    n = call.first.ndim
    d = call["dim"] % (n + 1)
    labels, count = tuple(range(n)), len(call.specs)
    return Rule([labels] * count, [(*labels[:d], None, *labels[d:])], linear=(frozenset(range(count)),))


@rule("aten.repeat")
def repeat(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Dimensions that are repeated once stay as they are; others need all of what they repeat."""
    repeats = call["repeats"]
    shift = len(repeats) - call.first.ndim
    labels = tuple(d if n == 1 and d >= shift else None for d, n in enumerate(repeats))
    return Rule([labels[shift:]], [labels])


@rule("aten.block_diag", "aten._chunk_cat")
def joined_whole(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """No dimension of an input is one of the result."""
    return replicated(call, outs)


# -- matrices ------------------------------------------------------------------------------------------------------
@rule("aten.tril", "aten.triu")
def triangle(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A piece of a matrix has its own diagonal: the global one, seen from the piece's corner."""
    n = call.first.ndim
    labels = tuple(range(n))
    return Rule([labels], [labels], linear=_FIRST, kernels={n - 2: "triangle_piece", n - 1: "triangle_piece"})


@rule("aten.trace")
def trace(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The sum of what each piece has of the diagonal."""
    return Rule(
        [("row", "column")], [()], reduce={"row": "sum", "column": "sum"}, linear=_FIRST,
        kernels={"row": "trace_piece", "column": "trace_piece"},
    )  # fmt: skip


@rule("aten.diag_embed")
def diag_embed(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The last dimension becomes the diagonal of two new ones."""
    n = outs[0].ndim
    new = {call["dim1"] % n, call["dim2"] % n}
    rest = iter(range(call.first.ndim - 1))
    return Rule([(*range(call.first.ndim - 1), None)], [tuple(None if d in new else next(rest) for d in range(n))])


# -- a view's place in its base ------------------------------------------------------------------------------------
def _placed(call: Call, base: Labels, part: Labels) -> list[Labels]:
    names = {"self": base, "src": part, "grad_output": part, "grad_in": part}
    return [names[name] for name in call.slots]


def _view_dims(call: Call, ndim: int) -> tuple[Labels, Labels]:
    """Labels of a base of ``ndim`` dimensions and of the view of it that the call speaks of."""
    name = call.name.removeprefix("aten.")
    if name.startswith("diagonal"):
        base = whole_along([call["dim1"], call["dim2"]], ndim)
        return base, (*(x for x in base if x is not None), None)
    base = whole_along([call["dim"]], ndim)
    if name.startswith("select"):
        return base, tuple(x for x in base if x is not None)
    return base, base if name.startswith("slice") else (*base, None)


@rule("aten.select_scatter", "aten.slice_scatter", "aten.diagonal_scatter")
def scatter_view(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A copy of the base with ``src`` in place of one of its views."""
    base, part = _view_dims(call, call.first.ndim)
    return Rule(_placed(call, base, part), [base], linear=_BOTH)


@rule("aten.slice_backward")
def slice_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Zeros in the base's shape, with the gradient in the place of the slice."""
    n = outs[0].ndim
    d = call["dim"] % n
    if call.first.shape == tuple(outs[0].shape):  # the slice was all of it; its bounds fit pieces as well
        labels = tuple(range(n))
        return Rule([labels], [labels], resize=("input_sizes", 0))
    size = outs[0].shape[d]
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(size)
    if step != 1:
        labels = whole_along([d], n)
        return Rule([labels], [labels], resize=("input_sizes", 0))
    labels = line_along(d, n)
    return Rule(
        [labels], [labels], resize=("input_sizes", 0), joined=LINE, kernels={LINE: "slice_backward_piece"},
        stretches=({0: (start, max(start, stop))}, {0: (0, size)}),
    )  # fmt: skip


@rule("aten.select_backward", "aten.diagonal_backward", "aten.unfold_backward")
def view_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Zeros in the base's shape, with the gradient in the place of the view."""
    base, part = _view_dims(call, outs[0].ndim)
    return Rule(_placed(call, base, part), [base], resize=("input_sizes", 0))


@rule("aten.as_strided", "aten.as_strided_copy", "aten.as_strided_scatter")
def as_strided(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Strides speak of the memory of the whole tensor. Its outermost dimension may be cut where the view has it too.

    Raises:
        NotImplementedError: the tensor is a view that skips parts of its base's memory, which no device has.
    """
    spec = call.first
    if spec.numel and dense_strides(spec.shape, spec.shape, spec.stride) != spec.stride:
        raise NotImplementedError(
            f"{call.func} of a cut view with gaps in its memory (shape {spec.shape}, strides {spec.stride}): no device "
            "holds that memory whole. Index the tensor instead, or redistribute what it is a view of to Replicate()."
        )
    size, stride = tuple(call["size"]), tuple(call["stride"])
    outer = max(range(spec.ndim), key=lambda d: spec.stride[d] * (spec.shape[d] > 1), default=None)
    offset = call["storage_offset"] or 0
    if call.name == "aten.as_strided_scatter" or outer is None or not spec.numel or 0 in size:
        return replicated(call, outs)
    for d in range(len(size)):
        reach = offset + sum((n - 1) * s for i, (n, s) in enumerate(zip(size, stride, strict=True)) if i != d)
        if size[d] == spec.shape[outer] > 1 and stride[d] == spec.stride[outer] > reach:
            source = tuple("cut" if i == outer else None for i in range(spec.ndim))
            return Rule([source], [tuple("cut" if i == d else None for i in range(len(size)))], resize=("size", 0))
    return replicated(call, outs)


# -- new tensors ---------------------------------------------------------------------------------------------------
@rule("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty", "aten.new_empty_strided")
def new(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Only shape and dtype of the argument count. Dimensions as long as the argument's are cut like them."""
    source, shape = call.first.shape, tuple(outs[0].shape)
    if len(source) == len(shape):
        result = tuple(d if n == source[d] else None for d, n in enumerate(shape))
    else:
        result = (None,) * len(shape)
    # What the result lacks is no reason to gather the argument: its values are not read.
    inputs: Labels = tuple(d if d in result else None for d in range(len(source)))
    strided = call.name == "aten.new_empty_strided"
    return Rule(
        [inputs], [result], unused=frozenset({0}),
        resize=None if strided else ("size", 0), kernel="new_strided_piece" if strided else None,
    )  # fmt: skip


@rule("aten.linspace", "aten.logspace")
def spaced(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """From and to values that are tensors of one element."""
    return replicated(call, outs)
