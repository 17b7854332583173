"""Indexing rules against plain torch, on cut, uneven, empty and Partial pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep, value_of

R = Replicate()


def _x(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def _i(high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(high + sum(shape))
    return torch.randint(high, shape, generator=generator)


def _mask(*shape: int) -> torch.Tensor:
    return _x(*shape) > 0


def _put(x: torch.Tensor, indices: list[torch.Tensor | None], v: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, torch.ops.aten.index_put(x, indices, v))


def _set(x: torch.Tensor, i: Any, v: Any) -> torch.Tensor:
    y = x.clone()
    y[i] = v
    return y


Case = tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]

READS: list[Case] = [
    ("first", lambda x, i: x[i], (_x(5, 3), _i(5, 7))),
    ("last", lambda x, i: x[..., i], (_x(5, 3), _i(3, 4))),
    ("negative", lambda x, i: x[:, i - 3], (_x(5, 3), _i(3, 2, 3))),
    ("pairs", lambda x, i, j: x[i, j], (_x(5, 3), _i(5, 7), _i(3, 7))),
    ("stretched", lambda x, i, j: x[i, j], (_x(5, 3, 2), _i(5, 3, 1), _i(3, 5))),
    ("middle", lambda x, i, j: x[:, i, j], (_x(3, 5, 7, 2), _i(5, 3), _i(7, 3))),
    ("gap", lambda x, i, j: x[:, i, :, j], (_x(3, 5, 2, 7), _i(5, 3), _i(7, 3))),
    ("gap at the front", lambda x, i, j: x[i, :, j], (_x(3, 5, 7), _i(3, 4, 1), _i(7, 5))),
    ("one", lambda x, i: x[i], (_x(5, 3), torch.tensor(2))),
    ("none", lambda x, i: x[i], (_x(5, 3), _i(5, 0))),
    ("mask", lambda x, m: x[m], (_x(5, 3), _mask(5))),
    ("mask of all", lambda x, m: x[m], (_x(5, 3), _mask(5, 3))),
    ("mask and positions", lambda x, m, i: x[m, i], (_x(3, 4, 5), torch.tensor([True, False, True]), _i(4, 2))),
    ("unsafe", lambda x, i: torch.ops.aten._unsafe_index(x, [None, i]), (_x(5, 3), _i(3, 4))),
    ("index_select 0", lambda x, i: x.index_select(0, i), (_x(5, 3, 1), _i(5, 7))),
    ("index_select -1", lambda x, i: x.index_select(-1, i), (_x(5, 1, 7), _i(7, 3))),
    ("index_select of a number", lambda x, i: x.index_select(0, i), (torch.tensor(2.0), _i(1, 1))),
    ("gather 0", lambda x, i: x.gather(0, i), (_x(5, 3), _i(5, 7, 3))),
    ("gather 1", lambda x, i: x.gather(1, i), (_x(5, 3), _i(3, 5, 7))),
    ("gather from less", lambda x, i: x.gather(1, i), (_x(5, 3), _i(3, 4, 2))),
    ("gather nothing", lambda x, i: x.gather(1, i), (_x(5, 3), _i(3, 5, 0))),
    ("take", lambda x, i: x.take(i), (_x(5, 3), _i(15, 7, 2))),
    ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (_x(5, 3), _i(3, 5, 1))),
    ("nonzero", lambda m: m.nonzero(), (_mask(5, 3),)),
    ("nonzero_static", lambda m: torch.nonzero_static(m, size=7), (_mask(5, 3),)),
    ("masked_select", lambda x, m: x.masked_select(m), (_x(5, 3), _mask(3))),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 1), (_x(5, 3),)),
    ("repeat_interleave by tensor", lambda x, n: x.repeat_interleave(n, 0), (_x(5, 3), _i(4, 5))),
    ("repeat_interleave to 6", lambda n: torch.repeat_interleave(n, output_size=6), (torch.tensor([1, 0, 3, 2]),)),
]

WRITES: list[Case] = [
    ("index_put", lambda x, i, v: x.index_put((i,), v), (_x(5, 3), torch.tensor([4, 0, 2]), _x(3, 3))),
    ("one row for all", lambda x, i, v: x.index_put((i,), v), (_x(5, 3), torch.tensor([4, 0]), _x(3))),
    ("accumulate", lambda x, i, v: x.index_put((i,), v, accumulate=True), (_x(5, 3), _i(5, 7), _x(7, 3))),
    ("second dimension", lambda x, i, v: _put(x, [None, i], v), (_x(5, 3), torch.tensor([2, 0]), _x(5, 2))),
    ("gap", lambda x, i, j, v: _put(x, [i, None, j], v), (_x(3, 5, 7), torch.tensor([0, 2]), _i(7, 2), _x(2, 5))),
    ("mask, one value", lambda x, m, v: x.index_put((m,), v), (_x(5, 3), _mask(5), torch.tensor(2.0))),
    ("mask of all, one value", lambda x, m, v: x.index_put((m,), v), (_x(5, 3), _mask(5, 3), torch.tensor([2.0]))),
    ("mask after all", lambda x, m, v: _put(x, [None, m], v), (_x(3, 5, 3), _mask(5, 3), torch.tensor(1.0))),
    ("mask, rows", lambda x, m, v: x.index_put((m,), v), (_x(3, 5), torch.tensor([True, False, True]), _x(2, 5))),
    ("setitem", _set, (_x(5, 3), torch.tensor([3, 1]), _x(2, 3))),
    ("setitem by mask", lambda x, m: _set(x, m, -1.0), (_x(5, 3), _mask(5, 3))),
    ("index_add", lambda x, i, v: x.index_add(0, i, v, alpha=2), (_x(5, 3), _i(5, 7), _x(7, 3))),
    ("index_add_", lambda x, i, v: x.clone().index_add_(1, i, v), (_x(5, 3), _i(3, 4), _x(5, 4))),
    ("index_copy", lambda x, i, v: x.index_copy(1, i, v), (_x(5, 3), torch.tensor([2, 0]), _x(5, 2))),
    ("index_copy_", lambda x, i, v: x.clone().index_copy_(2, i, v), (_x(3, 5, 7), torch.tensor([6]), _x(3, 5, 1))),
    ("index_fill", lambda x, i: x.index_fill(0, i, 3.0), (_x(5, 3), torch.tensor([4, 1]))),
    ("index_fill by tensor", lambda x, i, v: x.index_fill(1, i, v), (_x(5, 3), torch.tensor([0]), torch.tensor(2.0))),
    ("index_reduce", lambda x, i, v: x.index_reduce(0, i, v, "amax"), (_x(5, 3), _i(5, 7), _x(7, 3))),
    ("scatter", lambda x, i, v: x.scatter(0, i, v), (_x(5, 3), torch.tensor([[4, 0, 1], [0, 2, 3]]), _x(2, 3))),
    ("scatter less", lambda x, i, v: x.scatter(1, i, v), (_x(5, 3), _i(3, 4, 1), _x(5, 3))),
    ("scatter a number", lambda x, i: x.scatter(1, i, 7.0), (_x(5, 3), _i(3, 5, 2))),
    ("scatter reduce", lambda x, i, v: x.scatter(1, i, v, reduce="multiply"), (_x(5, 3), _i(3, 5, 7), _x(5, 7))),
    ("scatter_add", lambda x, i, v: x.scatter_add(1, i, v), (_x(5, 3), _i(3, 5, 7), _x(5, 7))),
    ("scatter_add_", lambda x, i, v: x.clone().scatter_add_(0, i, v), (_x(5, 3), _i(5, 7, 3), _x(7, 3))),
    ("scatter_reduce", lambda x, i, v: x.scatter_reduce(0, i, v, "amin"), (_x(5, 3), _i(5, 7, 3), _x(7, 3))),
    ("scatter_reduce mean", lambda x, i, v: x.scatter_reduce(1, i, v, "mean"), (_x(5, 3), _i(3, 5, 7), _x(5, 7))),
    ("put", lambda x, i, v: x.put(i, v), (_x(5, 3), torch.tensor([14, 0, 7]), _x(3))),
    ("masked_scatter", lambda x, m, v: x.masked_scatter(m, v), (_x(5, 3), _mask(5, 3), _x(5, 3))),
]


@pytest.mark.parametrize(("run", "values"), [c[1:] for c in READS], ids=[c[0] for c in READS])
def test_reads(run: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> None:
    sweep(run, *values)


@pytest.mark.parametrize(("run", "values"), [c[1:] for c in WRITES], ids=[c[0] for c in WRITES])
def test_writes(run: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> None:
    # Repeated positions add in the order of the whole tensor on every device: the bits are those of one device.
    sweep(run, *values)


GRADIENTS: list[Case] = [
    ("index", lambda x, i: x[i].square(), (_x(5, 3), _i(5, 7))),
    ("index_select", lambda x, i: x.index_select(1, i).square(), (_x(5, 3), _i(3, 4))),
    ("gather", lambda x, i: x.gather(1, i).square(), (_x(5, 3), _i(3, 5, 4))),
    ("scatter", lambda x, i: torch.zeros_like(x).scatter(1, i, x).square(), (_x(5, 3), _i(3, 5, 3))),
    ("index_put", lambda x, i: torch.ones_like(x).index_put((i,), x[:2] * 3).square(), (_x(5, 3), _i(5, 2))),
    ("masked_scatter", lambda x, m: torch.ones_like(x).masked_scatter(m, x).square(), (_x(5, 3), _mask(5, 3))),
    ("take", lambda x, i: x.take(i).square(), (_x(5, 3), _i(15, 7))),
]


@pytest.mark.parametrize(("run", "values"), [c[1:] for c in GRADIENTS], ids=[c[0] for c in GRADIENTS])
def test_gradients(run: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> None:
    def gradient(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        run(leaf, *rest).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    sweep(gradient, *values, exact=False, partial=False, meshes=((3,), (2, 2)))


def test_cut_is_kept() -> None:
    """Dimensions that no index touches stay cut, and those of the index are cut as it is."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
    x, i = _x(5, 3, 4), _i(5, 7)
    cut = [spread(x, mesh, [Shard(d)]) for d in range(3)]
    whole, at, cut_at = spread(x, mesh, [R]), spread(i, mesh, [R]), spread(i, mesh, [Shard(0)])
    assert placements_of(cut[1][at]) == [Shard(1)]
    assert placements_of(cut[0][:, at % 3]) == [Shard(0)]
    assert placements_of(whole[cut_at]) == [Shard(0)]
    assert placements_of(whole[:, :, cut_at % 4]) == [Shard(2)]
    assert placements_of(cut[2].index_select(0, at)) == [Shard(2)]
    assert placements_of(whole.index_select(1, cut_at % 3)) == [Shard(1)]
    assert placements_of(cut[0].gather(2, spread(_i(4, 5, 3, 2), mesh, [R]))) == [Shard(0)]
    assert placements_of(whole.gather(2, spread(_i(4, 5, 3, 2), mesh, [Shard(1)]))) == [Shard(1)]
    rows = spread(_i(3, 5, 3, 4), mesh, [Shard(0)])
    assert placements_of(torch.zeros_like(cut[0]).scatter(1, rows, 1.0)) == [Shard(0)]
    assert placements_of(cut[1].index_put((at,), spread(_x(7, 3, 4), mesh, [R]))) == [Shard(1)]
    assert placements_of(cut[1].index_add(0, at, spread(_x(7, 3, 4), mesh, [Shard(1)]))) == [Shard(1)]
    assert placements_of(_set(cut[1], spread(_mask(5, 3, 4), mesh, [Shard(1)]), 0.0)) == [Shard(1)]
    assert placements_of(whole.take(cut_at)) == [Shard(0)]
    assert placements_of(spread(x, mesh, [Partial()]).index_select(0, at[:2])) == [Partial()]


def test_writes_in_place_keep_the_placements() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for p in (R, Shard(0), Shard(1), Partial()):
        x = spread(_x(5, 3), mesh, [p])
        before = placements_of(x)
        x.index_add_(0, spread(_i(5, 4), mesh, [Shard(0)]), spread(_x(4, 3), mesh, [Shard(1)]))
        assert placements_of(x) in (before, [R])
        torch.testing.assert_close(value_of(x), _x(5, 3).index_add_(0, _i(5, 4), _x(4, 3)))
