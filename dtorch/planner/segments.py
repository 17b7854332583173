"""Dimensions that are cut in segments, so that ``cat`` and ``split`` along a cut dimension move nothing.

``cat`` of tensors that are cut along it would have to bring their pieces in order: each device would get parts of other
devices' pieces. Instead, a device joins what it has, and the placement remembers the lengths of what was joined. Other
operators handle such a dimension as any that is cut, so long as they do not ask for places in the whole tensor; ``split``
and ``narrow`` between segments take it apart again. That keeps the joint attention of text and image tokens, fused
projections (query, key and value in one weight) and parallel branches (attention and MLP in one product) cut throughout.
Folding (samples, sequence) into one dimension, with the sequence cut, is the same: one segment for each sample.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise

from dtorch.core.placements import REPLICATE, Placement, Shard
from dtorch.core.spec import Span
from dtorch.planner.rule import Fold, Label, Labels, Rule

# Kernels that do not look for a device's place in the whole tensor, or know how to find it in one cut in segments.
_ANY_PIECES = frozenset({
    None, "view_result", "unless_empty", "add_once", "mean_piece", "reduce_piece", "attention_piece",
    "attention_backward_piece", "random", "nll_loss_piece", "nll_loss_backward_piece",
})  # fmt: skip

_MOST_SEGMENTS = 16
"""A dimension of more segments is made whole instead: each number of them is a placement of its own to plan for."""


def how_cut(rule: Rule, label: Label, p: Shard) -> Shard:
    """How a label is cut where a slot is cut along it as ``p`` says: in segments and units, as far as the rule allows."""
    if label in rule.units or label in rule.even:
        return Shard(0)
    any_pieces = rule.kernels.get(label) in _ANY_PIECES and rule.kernel in _ANY_PIECES
    return Shard(0, p.segments if any_pieces and label not in rule.in_order else (), p.unit)


def joined_candidate(
    rule: Rule, current: Sequence[Placement], parts: int
) -> tuple[list[Placement], list[Placement], Label] | None:
    """Placements in which the joined label is cut, where some slot is cut along it already.

    Args:
        rule: has a joined label.
        current: placement of each slot on the axis.
        parts: number of devices of the axis.
    """
    slots, results = rule.stretches
    cut = {slot: p for slot in slots if isinstance(p := current[slot], Shard) and rule.inputs[slot][p.dim] == rule.joined}
    if not cut or any(0 < b - a < parts for a, b in results.values()):  # a result that most devices have nothing of
        return None
    ends = sorted({end for stretch in (*slots.values(), *results.values()) for end in stretch})
    lengths: list[int] = []
    for a, b in pairwise(ends):
        known = (_between(p, slots[slot], a, b) for slot, p in cut.items())
        lengths.extend(next(filter(None, known), (b - a,)))
    if len(lengths) > _MOST_SEGMENTS:
        return None
    line = list(zip(lengths, pairwise(accumulate(map(abs, lengths), initial=ends[0])), strict=True))

    def place(labels: Labels, stretch: Span | None) -> Placement:
        if stretch is None:
            return REPLICATE
        inside = [n for n, (a, b) in line if stretch[0] <= a and b <= stretch[1]]
        return Shard(labels.index(rule.joined), tuple(inside))

    ins = [place(labels, slots.get(i)) for i, labels in enumerate(rule.inputs)]
    outs = [place(labels, results.get(i)) for i, labels in enumerate(rule.outputs)]
    return ins, outs, rule.joined


def fold_candidates(
    rule: Rule, current: Placement, parts: int
) -> Iterator[tuple[list[Placement], list[Placement], Label]]:
    """Placements of a reshape in which an inner dimension of a fold is cut: the folded one is cut in as many segments
    as that dimension is repeated in it.

    Args:
        rule: of one input and one result, with folds.
        current: placement of the input on the axis.
        parts: number of devices of the axis.
    """
    for fold in rule.folds:
        found = _apart(current, fold, parts) if fold.unfolds else _together(current, fold, parts)
        if found is not None:
            yield [current], [found], ("fold", fold.inner)


def unit_candidates(
    rule: Rule, current: Placement, parts: int, cut: Collection[Label]
) -> Iterator[tuple[list[Placement], list[Placement], Label]]:
    """Placements of a reshape whose outermost dimension is cut in uneven pieces: (heads, features) folded into one
    dimension is cut between heads, and such a dimension, taken apart, has whole heads in every piece.

    Args:
        rule: of one input and one result.
        current: placement of the input on the axis.
        parts: number of devices of the axis.
        cut: labels that axes before cut.
    """
    labels = rule.inputs[0]
    if not isinstance(current, Shard) or current.segments or any(isinstance(c, tuple) and c[0] == "fold" for c in cut):
        return
    label = labels[current.dim]
    if label not in rule.scales:
        return
    before, after = rule.scales[label]
    heads = math.gcd(before, after)
    # Where the cut goes through heads, a device gets the rest of its own from others, if there are as many as devices.
    for unit in (current.unit, before // heads if parts <= heads else 0):
        if unit and not unit * after % before:
            there = Shard(rule.outputs[0].index(label), (), unit * after // before)
            yield [Shard(current.dim, (), unit)], [there], ("unit", label)


def _together(p: Placement, fold: Fold, parts: int) -> Placement | None:
    if not isinstance(p, Shard) or p.dim != fold.inner or p.unit > 1:
        return None
    one = p.segments or (fold.size,)
    if len(one) * fold.count > _MOST_SEGMENTS or (fold.row > 1 and any(n % parts for n in one)):
        return None
    return Shard(fold.outer, tuple(n * fold.row for n in one) * fold.count)


def _apart(p: Placement, fold: Fold, parts: int) -> Placement | None:
    if not isinstance(p, Shard) or p.dim != fold.outer or p.unit > 1 or len(p.segments) % fold.count:
        return None
    one = p.segments[: len(p.segments) // fold.count]
    if one * fold.count != p.segments or sum(map(abs, one)) != fold.size * fold.row:
        return None
    if fold.row > 1 and any(n % (parts * fold.row) for n in one):
        return None
    return Shard(fold.inner, tuple(n // fold.row for n in one))


def _between(p: Shard, stretch: Span, a: int, b: int) -> tuple[int, ...]:
    """The segments between two places on the line, none when one of them does not end there."""
    segments = p.segments or (stretch[1] - stretch[0],)
    ends = list(accumulate(map(abs, segments), initial=stretch[0]))
    if a not in ends or b not in ends:
        return ()
    return segments[ends.index(a) : ends.index(b)]
