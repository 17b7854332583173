"""Views: reshape, permute, slice and their kin. Where the cut dimension survives, every device views its own part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Fold, Label, Labels, Rule, rule
from dtorch.planner.rules.along import LINE, line_along, whole_along

_IDENTITY = (frozenset({0}),)


def _labels(n: int) -> Labels:
    return tuple(range(n))


def _wrap(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else 0


@rule("aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias", "aten.view_copy", "aten._reshape_copy")
def reshape(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Dimensions are merged and split in groups; the outermost of a group stays cut when the pieces stay whole."""
    if call.func._overloadname == "dtype":
        return view_dtype(call, outs)
    source, target = call.first.shape, tuple(outs[0].shape)
    inputs: list[Label] = [None] * len(source)
    outputs: list[Label] = [None] * len(target)
    units: dict[Label, int] = {}
    scales: dict[Label, tuple[int, int]] = {}
    folds: list[Fold] = []
    for number, (group_in, group_out) in enumerate(_groups(source, target) if call.first.numel else ()):
        a = next((d for d in group_in if source[d] != 1), None)
        b = next((d for d in group_out if target[d] != 1), None)
        if a is None or b is None:
            continue
        inputs[a] = outputs[b] = number
        folds += _folds(group_in, group_out, source, target)
        if source[a] != target[b]:
            # Cut between common multiples only: each piece is then a whole number of indices on both sides.
            scales[number] = source[a], target[b]
            units[number] = math.gcd(source[a], target[b])
    return Rule(
        [tuple(inputs)], [tuple(outputs)], linear=_IDENTITY, units=units, resize=("size", 0), folds=folds, scales=scales
    )


def _folds(
    group_in: Sequence[int], group_out: Sequence[int], source: Sequence[int], target: Sequence[int]
) -> Iterator[Fold]:
    """The inner dimensions of a group that one side has as a single dimension."""
    apart, sizes = [d for d in group_in if source[d] != 1], source
    whole = [d for d in group_out if target[d] != 1]
    unfolds = len(apart) == 1
    if unfolds:
        apart, whole, sizes = whole, apart, target
    if len(whole) == 1:
        for i, d in enumerate(apart[1:], 1):
            before, after = (math.prod(sizes[x] for x in some) for some in (apart[:i], apart[i + 1 :]))
            yield Fold(d, whole[0], before, sizes[d], after, unfolds)


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Shortest runs of dimensions of both shapes with equal products."""
    out: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        group_in, group_out = [], []
        a = b = 1
        if i < len(source):
            group_in.append(i)
            a, i = source[i], i + 1
        if j < len(target):
            group_out.append(j)
            b, j = target[j], j + 1
        while a != b:
            if (a < b and i < len(source)) or j >= len(target):
                group_in.append(i)
                a, i = a * source[i], i + 1
            else:
                group_out.append(j)
                b, j = b * target[j], j + 1
        out.append((group_in, group_out))
    return out


def view_dtype(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Reinterpret the bits: the last dimension may change its size, the others stay."""
    n = call.first.ndim
    same = call.first.shape == tuple(outs[0].shape)
    labels = tuple(range(n)) if same else (*range(n - 1), None)
    return Rule([labels], [labels])


@rule("aten.view_as_real", "aten.view_as_complex", "aten.view_as_real_copy", "aten.view_as_complex_copy")
def complex_pairs(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A last dimension of two appears or disappears."""
    k = min(call.first.ndim, outs[0].ndim)
    common = tuple(range(k))
    return Rule([common + (None,) * (call.first.ndim - k)], [common + (None,) * (outs[0].ndim - k)], linear=_IDENTITY)


@rule("aten.permute", "aten.permute_copy")
def permute(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Result dimension i is dimension dims[i]."""
    n = call.first.ndim
    return Rule([_labels(n)], [tuple(d % n for d in call["dims"])], linear=_IDENTITY)


@rule("aten.t", "aten.numpy_T", "aten.adjoint", "aten.t_copy")
def t(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Matrix transpose."""
    labels = _labels(call.first.ndim)
    return Rule([labels], [labels[::-1]], linear=_IDENTITY)


@rule("aten.transpose.int", "aten.transpose_copy", "aten.swapaxes", "aten.swapdims")
def transpose(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Two dimensions change places."""
    n = call.first.ndim
    labels = list(_labels(n))
    if n:
        a, b = (_wrap(call[x], n) for x in (("dim0", "dim1") if call.get("dim0") is not None else ("axis0", "axis1")))
        labels[a], labels[b] = labels[b], labels[a]
    return Rule([_labels(n)], [tuple(labels)], linear=_IDENTITY)


@rule("aten.unsqueeze", "aten.unsqueeze_copy")
def unsqueeze(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A new dimension of size one."""
    n = call.first.ndim
    d = call["dim"] % (n + 1)
    labels = _labels(n)
    return Rule([labels], [(*labels[:d], None, *labels[d:])], linear=_IDENTITY)


@rule("aten.squeeze", "aten.squeeze_copy")
def squeeze(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Dimensions of global size one disappear; a local piece of size one must not."""
    shape = call.first.shape
    dims = call.get("dim")
    chosen = (
        range(len(shape))
        if dims is None
        else [_wrap(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims)]
    )
    gone = {d for d in chosen if len(shape) and shape[d] == 1}
    inputs = tuple(None if d in gone else d for d in range(len(shape)))
    return Rule(
        [inputs], [tuple(d for d in range(len(shape)) if d not in gone)], linear=_IDENTITY, kernel="view_result"
    )


@rule("aten.expand", "aten.expand_copy", "aten.expand_as", "aten.broadcast_to")
def expand(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Dimensions of size one are stretched; the others keep their cut."""
    shape, out = call.first.shape, tuple(outs[0].shape)
    shift = len(out) - len(shape)
    inputs = tuple(d + shift if n == out[d + shift] else None for d, n in enumerate(shape))
    outputs = tuple(d if d in inputs else None for d in range(len(out)))
    return Rule([inputs], [outputs], linear=_IDENTITY, resize=("size", 0))


@rule("aten.select.int", "aten.select_copy", "aten.unbind", "aten.unbind_copy")
def select(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """One dimension disappears; taken apart it must be whole."""
    d = _wrap(call["dim"], call.first.ndim)
    inputs = tuple(None if i == d else i for i in range(call.first.ndim))
    return Rule([inputs], [tuple(i for i in inputs if i is not None)] * len(outs), linear=_IDENTITY)


@rule("aten.slice.Tensor", "aten.slice_copy")
def slice_(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Part of one dimension."""
    n, d = call.first.ndim, _wrap(call["dim"], call.first.ndim)
    if call["step"] != 1:
        labels = whole_along([d], n)
        return Rule([labels], [labels], linear=_IDENTITY)
    if tuple(outs[0].shape) == call.first.shape:
        # Written with bounds that fit the global size (0:8), it does not fit a piece: view the result instead.
        return Rule([_labels(n)], [_labels(n)], linear=_IDENTITY, kernel="view_result")
    start = slice(call["start"], call["end"]).indices(call.first.shape[d])[0]
    return _told_apart(call, outs, d, start)


def _told_apart(call: Call, outs: Sequence[torch.Tensor], d: int, start: int) -> Rule:
    """Stretches of a dimension, one after the other from ``start``."""
    labels = line_along(d, call.first.ndim)
    stretches = pairwise(accumulate((o.shape[d] for o in outs), initial=start))
    return Rule(
        [labels], [labels] * len(outs), linear=_IDENTITY, joined=LINE, kernels={LINE: "stretches_piece"},
        stretches=({0: (0, call.first.shape[d])}, dict(enumerate(stretches))),
    )  # fmt: skip


@rule(
    "aten.split", "aten.split_with_sizes", "aten.split_copy", "aten.split_with_sizes_copy", "aten.chunk",
    "aten.tensor_split", "aten.unsafe_split", "aten.unsafe_split_with_sizes", "aten.unsafe_chunk", "aten.narrow",
    "aten.narrow_copy",
)  # fmt: skip
def split(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Stretches of one dimension."""
    d = _wrap(call["dim"], call.first.ndim)
    start = call["start"] if "narrow" in call.name else 0
    if not isinstance(start, int):  # only the workers know
        labels = whole_along([d], call.first.ndim)
        return Rule([labels], [labels], linear=_IDENTITY)
    return _told_apart(call, outs, d, slice(start, None).indices(call.first.shape[d])[0])


@rule("aten.diagonal", "aten.diagonal_copy", "aten.linalg_diagonal")
def diagonal(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Two dimensions become one at the end; both must be whole."""
    n = call.first.ndim
    used = {call["dim1"] % n, call["dim2"] % n}
    inputs = tuple(None if i in used else i for i in range(n))
    return Rule([inputs], [(*(i for i in inputs if i is not None), None)], linear=_IDENTITY)


@rule("aten.unfold", "aten.unfold_copy")
def unfold(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Windows along one dimension, which must be whole; they form a new last dimension."""
    n = call.first.ndim
    d = _wrap(call["dimension"], n)
    inputs = tuple(None if i == d else i for i in range(n))
    return Rule([inputs], [(*inputs, None) if n else (None,)], linear=_IDENTITY)
