"""Reading and writing at positions given by tensors. Dimensions that no index touches keep their cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtorch.core.spec import TensorSpec
from dtorch.planner.call import Call
from dtorch.planner.rule import Label, Labels, NoRule, Rule, replicated, rule
from dtorch.planner.rules.pointwise import broadcast_labels

_MASKS = (torch.bool, torch.uint8)


# -- tensor[i, j, mask] --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Layout:
    """Labels of an advanced index.

    Attributes:
        source: labels of the indexed tensor.
        positions: common shape of the index tensors; ``None`` where a mask says how many there are.
        result: (label, size) of each dimension of what is read or written, the positions' dimensions among them.
        masks: slot of each mask, and the first dimension of the tensor that it covers.
    """

    source: Labels
    positions: tuple[int, ...] | None
    result: tuple[tuple[Label, int], ...]
    masks: dict[int, int]


def _layout(call: Call) -> _Layout:
    shape = call.first.shape
    source: list[Label] = []
    indexed: list[int] = []  # dimensions with an index tensor or a mask
    shapes: list[Sequence[int]] = []
    masks: dict[int, int] = {}
    for slot in call.slots["indices"]:
        d = len(source)
        if slot is None:
            source.append(("x", d))
            continue
        index, covered = call.specs[slot], 1
        if index.dtype in _MASKS:
            masks[slot], covered = d, index.ndim
        else:
            shapes.append(index.shape)
        indexed.extend(range(d, d + covered))
        source.extend([None] * covered)
    source.extend(("x", d) for d in range(len(source), len(shape)))
    if not indexed:
        raise NoRule(f"{call.name} with a mask of no dimensions")
    positions = None if masks else tuple(torch.broadcast_shapes(*shapes))
    depth = max([len(s) for s in shapes] + [1] * bool(masks))
    sizes = (-1,) * depth if positions is None else positions
    spread = [(("i", k), sizes[k]) for k in range(depth)]
    # Where there is a gap between index tensors, their dimensions come first; else they stand where the tensors stood.
    at = indexed[0] if indexed == list(range(indexed[0], indexed[-1] + 1)) else 0
    kept = [(("x", d), n) for d, n in enumerate(shape) if d not in indexed]
    return _Layout(tuple(source), positions, (*kept[:at], *spread, *kept[at:]), masks)


@rule("aten.index", "aten._unsafe_index")
def index(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every position is read on its own: dimensions of the index tensors may be cut, indexed ones may not."""
    layout = _layout(call)
    assert layout.positions is not None, "a call with a mask has results that only the workers can tell"
    inputs = [layout.source, *(broadcast_labels(s.shape, layout.positions, "i") for s in call.specs[1:])]
    return Rule(inputs, [tuple(x for x, _ in layout.result)], linear=(frozenset({0}),))


@rule("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def index_put(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Positions may repeat and lie anywhere, so they must be whole; one value behind a mask goes to every piece."""
    layout = _layout(call)
    values = call.slots["values"]
    inputs: list[Labels] = [(None,) * s.ndim for s in call.specs]
    inputs[0] = layout.source
    inputs[values] = _aligned(call.specs[values], layout.result)
    given = [slot for slot in call.slots["indices"] if slot is not None]
    if call.specs[values].numel == 1 and len(given) == 1 and given[0] in layout.masks:
        first, n = layout.masks[given[0]], call.specs[given[0]].ndim
        inputs[given[0]] = tuple(("x", d) for d in range(first, first + n))
        inputs[0] = tuple(("x", d) for d in range(call.first.ndim))
    return Rule(inputs, [inputs[0]], linear=() if layout.masks else (frozenset({0, values}),))


def _aligned(spec: TensorSpec, result: Sequence[tuple[Label, int]]) -> Labels:
    """Labels of values that broadcast to what an index reads: those of dimensions that no index touches."""
    if spec.ndim > len(result):
        return (None,) * spec.ndim  # torch will say what is wrong with it
    tail = result[len(result) - spec.ndim :]
    return tuple(x if x[0] == "x" and n == size else None for n, (x, size) in zip(spec.shape, tail, strict=True))


@rule("aten._unsafe_masked_index")
def masked_index(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """index, with a fill value where the mask, of the result's shape, is false."""
    layout = _layout(call)
    assert layout.positions is not None, "positions are never masks here"
    result = tuple(x for x, _ in layout.result)
    if len(result) != outs[0].ndim:
        return replicated(call, outs)
    stretched = broadcast_labels(call.spec("mask").shape, outs[0].shape)
    mask = tuple(None if x is None else result[x[1]] for x in stretched)
    indices = [broadcast_labels(s.shape, layout.positions, "i") for s in call.specs[2:]]
    return Rule([layout.source, mask, *indices], [result])


@rule("aten._unsafe_masked_index_put_accumulate")
def masked_index_put(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Adds values, where the mask is true, at positions that may repeat."""
    layout = _layout(call)
    values = call.slots["values"]
    inputs: list[Labels] = [(None,) * s.ndim for s in call.specs]
    if layout.positions is not None:
        inputs[0] = layout.source
        inputs[call.slots["mask"]] = _aligned(call.spec("mask"), layout.result)
        inputs[values] = _aligned(call.specs[values], layout.result)
    return Rule(inputs, [inputs[0]], linear=(frozenset({0, values}),))


# -- one dimension, one index --------------------------------------------------------------------------------------
def _others(spec: TensorSpec, dim: int, shape: Sequence[int]) -> Labels:
    """Labels of all dimensions but ``dim`` that have the size they have in ``shape``; others are whole."""
    if spec.ndim != len(shape):
        return (None,) * spec.ndim
    return tuple(d if d != dim and n == shape[d] else None for d, n in enumerate(spec.shape))


def _dim(call: Call) -> int:
    n = call.first.ndim
    return int(call["dim"]) % n if n else 0


@rule("aten.index_select")
def index_select(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The index's dimension takes the place of the one it selects from."""
    n, dim = call.first.ndim, _dim(call)
    if n == 0 or call.specs[1].ndim == 0:
        kept = tuple(None if d == dim else d for d in range(n))
        return Rule([kept, (None,) * call.specs[1].ndim], [kept], linear=(frozenset({0}),))
    source = tuple(None if d == dim else d for d in range(n))
    return Rule([source, ("i",)], [(*source[:dim], "i", *source[dim + 1 :])], linear=(frozenset({0}),))


@rule("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.index_reduce")
def index_write(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Slices along one dimension are written; positions may repeat, so that dimension is whole."""
    dim, shape = _dim(call), call.first.shape
    source = call.slots.get("source")
    inputs = [_others(call.first, dim, shape)]
    inputs += [_others(s, dim, shape) if i == source else (None,) * s.ndim for i, s in enumerate(call.specs) if i]
    if source is not None and inputs[source] != inputs[0]:
        return replicated(call, outs)
    linear = call.name in ("aten.index_add", "aten.index_copy")
    return Rule(inputs, [inputs[0]], linear=[frozenset({0, call.slots["source"]})] if linear else [])


@rule("aten.gather")
def gather(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every result is read on its own; along ``dim`` from anywhere, along others from the same place."""
    source, index = call.specs
    dim = _dim(call)
    if source.ndim != index.ndim or source.ndim == 0:
        return replicated(call, outs)
    labels = list(_others(index, dim, source.shape))
    read = tuple(labels)
    labels[dim] = "i"
    return Rule([read, tuple(labels)], [tuple(labels)], linear=(frozenset({0}),))


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Writes along ``dim`` to anywhere, along others to the same place, where all tensors are equally long."""
    dim, shape = _dim(call), call.first.shape
    source = call.slots.get("src")
    common = [_others(s, dim, shape) for s in call.specs if s.ndim]
    if not common or any(len(x) != len(shape) for x in common):
        return replicated(call, outs)
    labels = tuple(x[0] if len(set(x)) == 1 else None for x in zip(*common, strict=True))
    inputs = [labels if s.ndim else () for s in call.specs]
    additive = call.name == "aten.scatter_add" or (call.name == "aten.scatter" and call.get("reduce") is None)
    return Rule(inputs, [labels], linear=[frozenset({0, source})] if additive and source is not None else [])


@rule("aten.take")
def take(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Positions count through the whole tensor; the result is cut as they are."""
    labels = tuple(range(call.specs[1].ndim))
    return Rule([(None,) * call.first.ndim, labels], [labels], linear=(frozenset({0}),))


@rule(
    "aten.put", "aten.masked_scatter", "aten.masked_scatter_backward", "aten.nonzero_static", "aten.multinomial",
    "aten.poisson", "aten.binomial", "aten._standard_gamma", "aten._sample_dirichlet",
)  # fmt: skip
def in_order(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Element by element in the order of the whole tensor, which every device must have."""
    return replicated(call, outs)


@rule("aten.nonzero", "aten.masked_select", "aten.repeat_interleave.Tensor")
def counted(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The values decide how long the result is: every device looks at all of them."""
    return replicated(call, outs)
