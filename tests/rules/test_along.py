"""Operators along one dimension against plain torch, on cut, uneven, empty and Partial pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep


def _x(*shape: int) -> torch.Tensor:
    """Distinct numbers in a mixed order."""
    n = torch.Size(shape).numel()
    return torch.randperm(n, generator=torch.Generator().manual_seed(n)).reshape(shape).float() - n // 3


def _i(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(high + sum(shape)))


Function = Callable[..., Any]

# Functions of (tensor, dim).
ALONG: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "sort": lambda x, d: x.sort(d, descending=True),
    "stable sort": lambda x, d: (x % 3).sort(dim=d, stable=True),
    "argsort": lambda x, d: x.argsort(d),
    "topk": lambda x, d: x.topk(min(2, x.shape[d]), d),
    "smallest": lambda x, d: x.topk(1, d, largest=False),
    "kthvalue": lambda x, d: x.kthvalue(1, d),
    "mode": lambda x, d: (x % 3).mode(d),
    "median": lambda x, d: x.median(d),
    "max": lambda x, d: x.max(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "cummax": lambda x, d: x.cummax(d),
    "cummin": lambda x, d: x.cummin(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "cumsum of bools": lambda x, d: (x > 0).cumsum(d),
    "cumsum to double": lambda x, d: x.cumsum(d, dtype=torch.float64),
    "cumprod": lambda x, d: (x / 7).cumprod(d),
    "logcumsumexp": lambda x, d: (x / 7).logcumsumexp(d),
    "diff": lambda x, d: x.diff(dim=d),
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(2, d),
    "unbind": lambda x, d: x.unbind(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "variance": lambda x, d: torch.var_mean(x, d, correction=0),
    "norm": lambda x, d: x.norm(dim=d),
    "quantile": lambda x, d: x.quantile(0.4, d),
}
INEXACT = {"logsumexp", "variance", "norm", "logcumsumexp", "quantile", "cumprod"}


@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("shape", [(5, 3), (7,), (1, 5, 2)], ids=str)
def test_along(name: str, shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        x = _x(*shape)
        sweep(lambda x, dim=dim: ALONG[name](x, dim), x, exact=name not in INEXACT, meshes=((2,), (4,), (2, 2)), most=6)


@pytest.mark.parametrize("name", ["sort", "cumsum", "cummax", "flip", "roll", "topk", "cumprod", "logcumsumexp"])
def test_placement_is_kept(name: str) -> None:
    """Lines stay where they are; along the cut dimension, results are whole."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for cut in (0, 1):
        got = ALONG[name](spread(_x(5, 3), mesh, [Shard(cut)]), 1 - cut)
        results = got if isinstance(got, tuple) else (got,)
        assert all(placements_of(r) == [Shard(cut)] for r in results)
        got = ALONG[name](spread(_x(5, 3), mesh, [Shard(cut)]), cut)
        assert all(placements_of(r) == [Replicate()] for r in (got if isinstance(got, tuple) else (got,)))
    linear = ALONG[name](spread(_x(5, 3), mesh, [Partial()]), 0)
    if name in ("cumsum", "flip", "roll"):
        assert placements_of(linear) == [Partial()]


OTHERS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "flip two": (lambda x: x.flip(0, 2), (_x(3, 5, 2),)),
    "roll everything": (lambda x: x.roll(4), (_x(5, 3),)),
    "roll two": (lambda x: x.roll((1, -2), (0, 1)), (_x(5, 3, 2),)),
    "rot90": (lambda x: x.rot90(1, (0, 2)), (_x(5, 3, 2),)),
    "fliplr": (lambda x: x.fliplr(), (_x(5, 3),)),
    "msort": (lambda x: x.msort(), (_x(5, 3),)),
    "median of all": (lambda x: x.median(), (_x(5, 3),)),
    "searchsorted": (torch.searchsorted, (torch.arange(5.0), _x(5, 3))),
    "searchsorted in rows": (
        lambda e, v: torch.searchsorted(e, v, right=True), (_x(3, 5).sort(-1).values, _x(3, 7)),
    ),
    "searchsorted by order": (
        lambda e, v, o: torch.searchsorted(e, v, sorter=o), (_x(5), _x(3, 2), _x(5).argsort()),
    ),
    "searchsorted for a number": (lambda e: torch.searchsorted(e, 2.0), (torch.arange(5.0),)),
    "bucketize": (torch.bucketize, (_x(5, 3), torch.arange(4.0))),
    "isin": (lambda x, t: torch.isin(x, t, invert=True), (_i(0, 9, 5, 3), _i(0, 9, 4))),
    "isin of a number": (lambda x: torch.isin(x, 3), (_i(0, 9, 5, 3),)),
    "a number isin": (lambda t: torch.isin(3, t), (_i(0, 9, 5),)),
    "histc": (lambda x: x.histc(4, -3, 8), (_x(5, 3),)),
    "histc of its range": (lambda x: x.histc(4), (_x(5, 3),)),
    "renorm": (lambda x: x.renorm(1, 2, 1.0), (_x(1, 5, 3),)),
    "histogram": (lambda x: x.histogram(4), (_x(5, 3),)),
    "histogramdd": (lambda x: torch.histogramdd(x, [2, 3]), (_x(5, 2),)),
    "bincount": (lambda x, w: x.bincount(w), (_i(0, 5, 7), _x(7))),
    "unique": (lambda x: x.unique(return_inverse=True, return_counts=True), (_i(0, 5, 7, 3),)),
    "unique rows": (lambda x: x.unique(dim=0), (_i(0, 2, 7, 3),)),
    "unique_consecutive": (lambda x: x.unique_consecutive(), (_i(0, 3, 7),)),
    "segment_reduce": (
        lambda x, n: torch.segment_reduce(x, "max", lengths=n), (_x(5, 3), torch.tensor([2, 0, 3])),
    ),
    "segment_reduce in rows": (
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n, axis=1), (_x(2, 5, 3), torch.tensor([[2, 3], [1, 4]])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    run, values = OTHERS[name]
    sweep(run, *values)


def test_histogram_of_whole_numbers() -> None:
    """CUDA counts integers, as routers of experts do; the CPU has no kernel for them."""
    x, mesh = _i(0, 5, 7, 3), dtorch.DeviceMesh("cpu", [0, 1, 2])
    for p in (Replicate(), Shard(0), Shard(1)):
        got = spread(x, mesh, [p]).int().histc(5, 0, 4)
        assert got.dtype == torch.int32
        assert got.tolist() == x.double().histc(5, 0, 4).tolist()


def test_histogram_with_a_range_stays_unfinished() -> None:
    """Counts of pieces are added when they are needed, whatever ranges were asked for before."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = spread(_x(5, 3), mesh, [Shard(0)])
    assert placements_of(x.histc(4, -2, 2)) == [Partial()]
    assert placements_of(x.histc(4, 0, 0)) == [Replicate()]


_DIFFERENTIABLE = ("cumsum", "cumprod", "logcumsumexp", "cummax", "sort", "topk", "flip", "median", "roll")


@pytest.mark.parametrize("name", _DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    def gradient(x: torch.Tensor, scale: torch.Tensor) -> Any:
        leaf = (x / 5 + 0.1).detach().requires_grad_()
        got = ALONG[name](leaf, 1)
        got = got[0] if isinstance(got, tuple) else got
        (got * got * scale).sum().backward()
        return leaf.grad

    sweep(gradient, _x(5, 3), _x(5, 1), exact=False, partial=False, meshes=((3,), (2, 2)))
