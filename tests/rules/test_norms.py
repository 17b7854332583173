"""Norms of tensors large enough that their cut dimensions are not gathered."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep, value_of

ORDERS = (2, 1, 0, 3, 0.5, math.inf, -math.inf)


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("order", ORDERS)
def test_vector_norm(order: float) -> None:
    x = _x(131, 257)
    for dim, keep in ((None, False), (0, True), ((1, 0), False)):
        sweep(
            lambda x, dim=dim, keep=keep: torch.linalg.vector_norm(x, order, dim, keep),
            x, exact=False, partial=False, meshes=((3,), (2, 2)), most=4,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Squares of half precision numbers neither overflow nor lose digits."""
    x = (_x(199, 257) * 300).to(dtype)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for dtype_of_result in (None, torch.complex128 if dtype.is_complex else torch.float64):
        want = torch.linalg.vector_norm(x, dtype=dtype_of_result)
        got = torch.linalg.vector_norm(spread(x, mesh, [Shard(0)]), dtype=dtype_of_result)
        assert got.dtype == want.dtype
        torch.testing.assert_close(value_of(got), want, rtol=max(1e-5, torch.finfo(want.dtype).eps), atol=0)


def test_only_sums_travel() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = spread(_x(200, 257), mesh, [Shard(0)])
    assert placements_of(torch.linalg.vector_norm(x, 1)) == [Partial()]
    assert placements_of(torch.linalg.vector_norm(x, 2, 1)) == [Shard(0)]
    small = spread(_x(5, 3), mesh, [Shard(0)])
    assert torch.equal(value_of(small.norm()), _x(5, 3).norm()), "small ones keep the bits of one device"


def _clipped(xs: list[Any], order: float) -> list[Any]:
    leaves = [x.detach().clone().requires_grad_() for x in xs]
    for leaf in leaves:
        leaf.grad = leaf.detach().clone()
    total = torch.nn.utils.clip_grad_norm_(leaves, 0.5, order)
    return [total, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_clipping(order: float) -> None:
    xs = [_x(131, 257), _x(7), _x(257, 131), _x(40000)]
    where: list[list[Any]] = [[Shard(0)], [Shard(0)], [Shard(1)], [Replicate()]]
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
    want = _clipped(xs, order)
    got = _clipped([spread(x, mesh, p) for x, p in zip(xs, where, strict=True)], order)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(value_of(g), w, rtol=1e-5, atol=1e-5)
    assert [placements_of(g) for g in got[1:]] == where
