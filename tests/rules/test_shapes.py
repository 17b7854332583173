"""Joining, repeating, placing and making tensors against plain torch, on cut, uneven, empty and Partial pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep, value_of

Function = Callable[..., Any]
aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


VALUES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "cat": (lambda a, b: torch.cat([a, b]), (_x(5, 3), _x(1, 3))),
    "cat -1": (lambda a, b, c: torch.cat([a, b, c], -1), (_x(5, 3), _x(5, 1), _x(5, 7))),
    "cat of dtypes": (lambda a, b: torch.cat([a, b.int()], 1), (_x(5, 3), _x(5, 2))),
    "cat with an empty vector": (lambda a, b: torch.cat([b, a], 1), (_x(5, 3), torch.empty(0))),
    "stack": (lambda a, b: torch.stack([a, b]), (_x(5, 3), _x(5, 3))),
    "stack -1": (lambda a, b: torch.stack([a, b], -1), (_x(5, 3), _x(5, 3))),
    "hstack": (lambda a, b: torch.hstack([a, b]), (_x(5, 3), _x(5, 1))),
    "vstack": (lambda a, b: torch.vstack([a, b]), (_x(3), _x(5, 3))),
    "block_diag": (torch.block_diag, (_x(5, 3), _x(2, 7))),
    "chunk_cat": (lambda a, b: torch._chunk_cat([a, b], 0, 2), (_x(4, 3), _x(6, 2))),
    "repeat": (lambda x: x.repeat(2, 1, 1), (_x(5, 3),)),
    "repeat in place": (lambda x: x.repeat(1, 3), (_x(5, 3),)),
    "repeat never": (lambda x: x.repeat(0, 1), (_x(5, 3),)),
    "tile": (lambda x: x.tile(2), (_x(5, 3),)),
    "tril": (lambda x: x.tril(), (_x(5, 7),)),
    "tril below": (lambda x: x.tril(-2), (_x(7, 5),)),
    "triu of stacks": (lambda x: x.triu(1), (_x(3, 5, 4),)),
    "triu_": (lambda x: x.clone().triu_(-1), (_x(5, 7),)),
    "trace": (torch.trace, (_x(7, 5),)),
    "diag_embed": (lambda x: x.diag_embed(1), (_x(5, 3),)),
    "diag_embed between": (lambda x: torch.diag_embed(x, dim1=0, dim2=2), (_x(5, 3),)),
    "diag": (lambda x: x.diag(), (_x(5),)),
    "diag of a matrix": (lambda x: x.diag(1), (_x(5, 7),)),
    "diagflat": (torch.diagflat, (_x(2, 3),)),
    "select_scatter": (lambda x, s: x.select_scatter(s, 1, 2), (_x(5, 3, 2), _x(5, 2))),
    "slice_scatter": (lambda x, s: x.slice_scatter(s, 1, 1, 7, 2), (_x(5, 7), _x(5, 3))),
    "diagonal_scatter": (lambda x, s: x.diagonal_scatter(s, 1, 0, 2), (_x(5, 3, 4), _x(3, 3))),
    "select_backward": (lambda g: aten.select_backward(g, [5, 3, 2], 1, 2), (_x(5, 2),)),
    "slice_backward": (lambda g: aten.slice_backward(g, [5, 7], 1, 1, 7, 2), (_x(5, 3),)),
    "slice_backward of all": (lambda g: aten.slice_backward(g, [5, 3], 1, 0, 3, 1), (_x(5, 3),)),
    "diagonal_backward": (lambda g: aten.diagonal_backward(g, [5, 3, 4], 0, 0, 2), (_x(3, 4),)),
    "unfold_backward": (lambda g: aten.unfold_backward(g, [5, 7], 1, 3, 2), (_x(5, 3, 3),)),
    "as_strided": (lambda x: x.as_strided((3, 2), (1, 4), 2), (_x(5, 3),)),
    "as_strided in rows": (lambda x: x.as_strided((5, 3, 3), (7, 2, 1)), (_x(5, 7),)),
    "as_strided in columns": (lambda x: x.t().contiguous().t().as_strided((2, 3), (2, 5)), (_x(5, 3),)),
    "as_strided of a row": (lambda x: x[1].as_strided((2,), (2,)), (_x(3, 5),)),
    "as_strided of every other": (lambda x: x[:, ::2].as_strided((3, 2), (5, 1), 1), (_x(3, 5),)),
    "as_strided_copy": (lambda x: torch.as_strided_copy(x, (5, 2), (3, 1)), (_x(5, 3),)),
    "as_strided_scatter": (lambda x, s: x.as_strided_scatter(s, (2, 2), (3, 1), 4), (_x(5, 3), _x(2, 2))),
    "linspace": (lambda a, b: torch.linspace(a, b, 5, device=a.device), (torch.tensor(1.0), torch.tensor(3.0))),
    "rsub": (lambda a, b: torch.rsub(a, b, alpha=2), (_x(5, 3), _x(3))),
    "floor_divide": (lambda a, b: a.floor_divide(b), (_x(5, 3), _x(5, 1).abs() + 1)),
    "floored": (lambda a: torch.div(a, 0.3, rounding_mode="floor"), (_x(5, 3),)),
    "number first": (lambda a: 2**a + torch.where(a > 0, 1.5, a), (_x(5, 3),)),
    "alias_copy": (torch.alias_copy, (_x(5, 3),)),
    "new_zeros": (lambda x: x.new_zeros(3, 2), (_x(5, 3),)),
    "new_zeros alike": (lambda x: x.new_zeros(x.shape, dtype=torch.int32), (_x(5, 3),)),
    "new_ones longer": (lambda x: x.new_ones(5, 7), (_x(5, 3),)),
    "new_full": (lambda x: x.new_full((5, 3), 2.5), (_x(5, 3),)),
    "new_empty": (lambda x: x.new_empty(5, 3).fill_(1), (_x(5, 3),)),
    "new_empty_strided": (lambda x: x.new_empty_strided((5, 3), (1, 5)).fill_(1), (_x(5, 3),)),
    "ones_like": (torch.ones_like, (_x(5, 3),)),
}
INEXACT = {"trace", "linspace"}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    run, values = VALUES[name]
    discontinuous = name in ("cat of dtypes", "floor_divide", "floored", "number first")
    sweep(run, *values, exact=name not in INEXACT, partial=not discontinuous)


STRIDED: tuple[Function, ...] = (
    lambda t: torch.cat([t.t(), t.t()]),
    lambda t: torch.stack([t, t], 1),
    lambda t: t.t().tril(),
    lambda t: t.t().cumsum(0),
    lambda t: t.flip(0),
    lambda t: t.new_empty_strided((4, 6), (1, 4)),
    lambda t: t.t().new_zeros(6, 4),
    lambda t: t[:, torch.tensor([1, 0])],
    lambda t: t.t().index_select(0, torch.tensor([1])),
    lambda t: t.as_strided((2, 2), (3, 2)),
)


def test_strides_are_torchs() -> None:
    mesh, x = dtorch.DeviceMesh("cpu", [0, 1]), _x(4, 6)
    for p in (Replicate(), Shard(0), Shard(1)):
        d = spread(x, mesh, [p])
        for run in STRIDED:
            assert run(d).stride() == run(x).stride()


def test_cut_is_kept() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for cut in (0, 1):
        x, other = spread(_x(4, 6), mesh, [Shard(cut)]), 1 - cut
        kept = [Shard(cut)]
        assert placements_of(torch.cat([x, x], other)) == kept
        assert placements_of(torch.stack([x, x])) == [Shard(cut + 1)]
        assert placements_of(x.repeat(3, 1, 1)) == [Shard(cut + 1)]
        assert placements_of(x.tril()) == placements_of(x.triu(2)) == kept
        assert placements_of(x.new_zeros(4, 6)) == placements_of(x.new_full((4, 6), 1)) == kept
        assert placements_of(x.new_zeros(7)) == placements_of(x.new_empty(2, 4, 6)) == [Replicate()]
        assert placements_of(x.new_empty_strided((4, 6), (1, 4))) == kept
        assert placements_of(x.trace()) == [Partial()]
        row = spread(_x(6), mesh, [Shard(0) if cut else Replicate()])
        assert placements_of(x.select_scatter(row, 0, 1)) == (kept if cut else [Replicate()])
        assert placements_of(aten.slice_backward(x, [4, 9] if cut == 0 else [9, 6], other, 0, 6 - 2 * cut, 1)) == kept
    terms = spread(_x(4, 6), mesh, [Partial()])
    assert placements_of(torch.cat([terms, terms])) == placements_of(terms.tril()) == [Partial()]
    assert placements_of(torch.zeros_like(terms)) == placements_of(terms.new_ones(4, 6)) == [Replicate()]
    assert placements_of(terms) == [Partial()], "nothing had to know its value"


def test_new_tensors_move_nothing() -> None:
    """The argument of new_zeros is not gathered, nor reduced."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for p in (Shard(0), Partial()):
        x = spread(_x(4, 6), mesh, [p])
        with dtorch.strict():
            x.new_zeros(3)
            torch.ones_like(x)


def test_strides_over_gaps_are_refused() -> None:
    """Pieces have no gaps between their elements, so strides that count gaps mean nothing to them."""
    x = spread(_x(4, 6), dtorch.DeviceMesh("cpu", [0, 1]), [Shard(0)]).new_empty_strided((4, 6), (12, 1))
    with pytest.raises(NotImplementedError, match="gaps in its memory"):
        x.as_strided((2, 2), (12, 1))


def test_writes_in_place() -> None:
    """A written tensor keeps its placements, whatever it had to be for the operator; nothing stays unfinished in it."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    a, b, c = _x(5, 4), _x(4, 3), _x(5, 3)
    for p in (Replicate(), Shard(0), Shard(1)):
        for q in (Replicate(), Shard(0), Shard(1)):
            for inner in ([Shard(1), Shard(0)], [Replicate(), Replicate()]):
                target = spread(c, mesh, [p])
                target.addmm_(spread(a, mesh, inner[:1]), spread(b, mesh, inner[1:]))
                assert placements_of(target) == [p]
                torch.testing.assert_close(value_of(target), torch.addmm(c, a, b))
            target = spread(c, mesh, [p])
            target.copy_(spread(c + 1, mesh, [q]))
            target.mul_(spread(c, mesh, [Partial()]))
            assert placements_of(target) == [p]
            torch.testing.assert_close(value_of(target), (c + 1) * c)


LISTS: dict[str, Function] = {
    "add": lambda xs: torch._foreach_add(xs, xs, alpha=2),
    "mul_": lambda xs: _written(xs, lambda ys: torch._foreach_mul_(ys, 3.0)),
    "addcmul_": lambda xs: _written(xs, lambda ys: torch._foreach_addcmul_(ys, xs, xs, value=0.5)),
    "sqrt": lambda xs: torch._foreach_sqrt(torch._foreach_abs(xs)),
    "copy_": lambda xs: _written(xs, lambda ys: torch._foreach_copy_(ys, torch._foreach_neg(xs))),
    "norm": torch._foreach_norm,
    "largest": torch._foreach_max,
    "by a tensor": lambda xs: torch._foreach_mul(xs, xs[0].sum()),
    "clip": lambda xs: torch.nn.utils.clip_grad_norm_([_with_gradient(x) for x in xs], 0.5),
}


def _written(xs: list[torch.Tensor], write: Function) -> list[torch.Tensor]:
    ys = [x.clone() for x in xs]
    write(ys)
    return ys


def _with_gradient(x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    leaf.grad = x.detach().clone()
    return leaf


@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str) -> None:
    sweep(lambda *xs: LISTS[name](list(xs)), _x(5, 3), _x(7), _x(1, 2, 3), exact=False)


def test_lists_are_placed_entry_by_entry() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    where: list[Any] = [Shard(0), Shard(1), Replicate(), Shard(1)]
    xs = [spread(_x(5, 4), mesh, [p]) for p in where]
    with dtorch.strict():
        assert [placements_of(x) for x in torch._foreach_add(xs, xs)] == [[p] for p in where]
        torch._foreach_lerp_(xs, torch._foreach_mul(xs, 2.0), 0.5)
        assert [placements_of(x) for x in xs] == [[p] for p in where]
