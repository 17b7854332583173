"""Every dtype that torch has on the CPU, every shape, every placement."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import dtorch
from dtorch import Shard
from tests.engine.helpers import S0, S1, P, R, both_modes, close, full, layouts, mesh, same, spread

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]
pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning", "ignore:ComplexHalf support is experimental")
EVERY = [torch.bool, *INTS, *UNSIGNED, *FLOATS, *COMPLEX, *SMALL]


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small numbers, whole where the operators are to be exact in any order of summing."""
    g = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3 if dtype.is_signed else 0, 4, shape, generator=g)
    if dtype.is_complex:
        return torch.complex(whole.float(), whole.flip(0).float() if whole.dim() else whole.float()).to(dtype)
    return whole.abs().to(dtype) if dtype in UNSIGNED or dtype == torch.float8_e8m0fnu else whole.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes: some dtypes cannot be compared."""
    x = x.resolve_conj().resolve_neg().contiguous()
    return x.view(torch.uint8) if x.dim() else x.view(1).view(torch.uint8)


def test_the_list_is_complete():
    known = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    other = {d for d in known if str(d).split(".")[1].startswith(("q", "bits", "uint", "int", "float4"))}
    assert known - other <= set(EVERY), known - other - set(EVERY)


@both_modes
def test_every_dtype_travels(mode):
    for dtype in EVERY:
        for shape in ((5, 3), (), (0, 2), (1,)):
            x = sample(shape, dtype)
            for where in layouts(len(shape), mesh(2), partial=False):
                d = spread(x, mesh(2), *where)
                assert d.dtype == dtype
                assert d.placements == where
                assert torch.equal(bits(d.to_torch()), bits(x))
                assert torch.equal(bits(d.redistribute(placements=[R]).to_torch()), bits(x))
                assert torch.equal(bits(d.clone().to_torch_async().get()), bits(x))
                assert torch.equal(bits(d.reshape(-1).view(shape).to_torch()), bits(x))
            assert str(dtype).removeprefix("torch.") in repr(d) or dtype in (torch.float32, torch.bool, torch.int64, torch.complex64)
        y = sample((5, 3), dtype)
        e = spread(y, mesh(2), S0)
        assert torch.equal(bits(e[1:4].to_torch()), bits(y[1:4]))
        assert torch.equal(bits(e.t().contiguous().to_torch()), bits(y.t().contiguous()))
        assert torch.equal(bits(torch.cat([e, e]).to_torch()), bits(torch.cat([y, y]))) if dtype not in SMALL else True
        e[2] = e[0].clone()
        y[2] = y[0].clone()
        assert torch.equal(bits(e.to_torch()), bits(y))
        assert e.redistribute(mesh(3), [S1]).placements == (S1,)


def test_casts():
    for source in EVERY:
        x = sample((5, 3), source)
        d = spread(x, mesh(2), S0)
        for target in EVERY:
            try:
                want = x.to(target)
            except (RuntimeError, NotImplementedError):
                continue
            got = d.to(target)
            assert got.dtype == target
            assert got.placements == (S0,)
            assert torch.equal(bits(got.to_torch()), bits(want)), (source, target)


def test_promotion():
    for a in [torch.bool, *INTS, *FLOATS, *COMPLEX[1:]]:
        for b in [torch.bool, *INTS, *FLOATS, *COMPLEX[1:]]:
            x, y = sample((5, 3), a), sample((3,), b, 1)
            same(spread(x, mesh(2), S0) + spread(y, mesh(2), R), x + y, [S0])
            same(spread(x, mesh(2), S0) * y, x * y, [S0])
        x = sample((5, 3), a)
        for number in (True, 2, 1.5, 1j):
            same(spread(x, mesh(2), S0) + number, x + number, [S0])
            same(number * spread(x, mesh(2), S1), number * x, [S1])
    same(spread(torch.tensor(3), mesh(2)) + torch.ones(2, dtype=torch.float16), torch.full((2,), 4, dtype=torch.float16))
    assert (spread(torch.tensor(2.0, dtype=torch.float64), mesh(2)) * spread(torch.ones(2), mesh(2))).dtype == torch.float32


# -- operators x dtypes x shapes x meshes x placements -------------------------------------------------------------
Op = Callable[..., Any]
UNARY: dict[str, Op] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "mul": lambda x: x * 3,
    "square": lambda x: x * x,
    "sum": lambda x: x.sum(),
    "sum0": lambda x: x.sum(0) if x.dim() else x,
    "sum last keep": lambda x: x.sum(-1, keepdim=True),
    "prod": lambda x: x.prod(-1),
    "max": lambda x: x.max() if x.numel() else x,
    "amin last": lambda x: x.amin(-1) if x.dim() and x.shape[-1] else x,
    "argmax": lambda x: x.argmax(-1) if x.dim() and x.shape[-1] else x,
    "any": lambda x: x.any(),
    "all last": lambda x: x.all(-1),
    "eq": lambda x: x == 1,
    "count_nonzero": lambda x: torch.count_nonzero(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x == 1, x, torch.zeros_like(x)),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.transpose(0, -1) if x.dim() else x,
    "slice": lambda x: x[1:] if x.dim() else x,
    "last": lambda x: x[..., -1] if x.dim() and x.shape[-1] else x,
    "flip": lambda x: x.flip(0) if x.dim() else x,
    "roll": lambda x: x.roll(1, -1) if x.dim() else x,
    "cumsum": lambda x: x.cumsum(-1) if x.dim() else x.cumsum(0),
    "cumsum first": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(stable=True, dim=-1) if x.dim() else x,
    "unique": lambda x: x.unique(),
    "cat": lambda x: torch.cat([x, x]) if x.dim() else x,
    "stack": lambda x: torch.stack([x, x], -1),
    "pad": lambda x: torch.nn.functional.pad(x, (1, 2)) if x.dim() else x,
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)) if x.dim() else x,
    "expand": lambda x: x.expand(2, *x.shape),
    "tril": lambda x: x.tril() if x.dim() >= 2 else x,
    "chunk": lambda x: x.chunk(2, -1) if x.dim() else x,
    "masked": lambda x: x[x != 0],
    "masked_fill": lambda x: x.masked_fill(x == 1, 0),
    "in place": lambda x: x.clone().add_(1),
    "row assign": lambda x: x.clone().index_fill_(0, torch.tensor([0]), 1) if x.dim() and len(x) else x,
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(),
    "isnan": torch.isnan,
    "float": lambda x: x.float(),
    "clamp": lambda x: x.clamp(0, 1),
    "sign": torch.sign,
    "unbind": lambda x: x.unbind(0) if x.dim() else x,
}
BINARY: dict[str, Op] = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "lt": torch.lt,
    "eq": torch.eq,
    "where": lambda x, y: torch.where(x == y, x, y),
    "floor_divide": lambda x, y: x // (y * y + 1),
    "copy": lambda x, y: x.clone().copy_(y),
    "outer": lambda x, y: x.flatten().outer(y.flatten()),
    "matmul": lambda x, y: x @ y.transpose(-1, -2) if x.dim() >= 2 else x * y,
    "cat": lambda x, y: torch.cat([x, y], -1) if x.dim() else torch.stack([x, y]),
    "isclose": lambda x, y: torch.equal(x, y),
}

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7]), max_size=3).map(tuple)
meshes = st.sampled_from([(1,), (2,), (3,), (2, 2)])


@st.composite
def placements(draw: st.DrawFn, ndim: int, axes: int) -> tuple[Any, ...]:
    """Any placement of a tensor of so many dimensions on a mesh of so many axes."""
    return tuple(draw(st.sampled_from([R, P, *(Shard(d) for d in range(ndim)), *(Shard(d) for d in range(ndim))])) for _ in range(axes))


def agree(op: Op, values: list[torch.Tensor], on: dtorch.DeviceMesh, where: list[tuple[Any, ...]]) -> None:
    """What torch gives, or its refusal."""
    given = [
        spread(v, on, *(R if p.is_partial() and v.dtype == torch.bool else p for p in row)) for v, row in zip(values, where, strict=True)
    ]
    try:
        want = op(*values)
    except (RuntimeError, IndexError, NotImplementedError, ValueError) as e:
        with pytest.raises((RuntimeError, IndexError, NotImplementedError, ValueError)):
            [full(g) for g in tree_leaves(op(*given))]
            pytest.fail(f"torch refused: {e}")
        with contextlib.suppress(RuntimeError):  # what the client refused to read may have failed on a worker too
            dtorch.synchronize()
        return
    for g, w in zip(tree_leaves(op(*given)), tree_leaves(want), strict=True):
        if isinstance(w, torch.Tensor):
            assert g.stride() == w.stride() or math.prod(w.shape) == 0
            same(g, w)
        else:
            assert g == w


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_unary(data):
    shape, size = data.draw(shapes, "shape"), data.draw(meshes, "mesh")
    dtype = data.draw(st.sampled_from([torch.bool, *INTS, *FLOATS, *COMPLEX[1:]]), "dtype")
    name = data.draw(st.sampled_from(sorted(UNARY)), "operator")
    where = data.draw(placements(len(shape), len(size)), "placements")
    agree(UNARY[name], [sample(shape, dtype)], mesh(*size), [where])


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_binary(data):
    shape, size = data.draw(shapes, "shape"), data.draw(meshes, "mesh")
    dtypes = st.sampled_from([torch.bool, *INTS, *FLOATS, *COMPLEX[1:]])
    a = data.draw(dtypes, "dtype")
    b = data.draw(st.sampled_from([a, a, data.draw(dtypes, "other dtype")]), "second dtype")
    name = data.draw(st.sampled_from(sorted(BINARY)), "operator")
    other = shape
    if name in ("add", "mul", "maximum", "lt", "eq", "where", "copy") and shape:
        other = data.draw(st.sampled_from([shape, shape[1:], (*shape[:-1], 1), (1, *shape[1:]), ()]), "second shape")
    assume(name != "matmul" or a == b != torch.float16)  # half precision rounds in another order
    where = [data.draw(placements(len(s), len(size)), "placements") for s in (shape, other)]
    agree(BINARY[name], [sample(shape, a), sample(other, b, 1)], mesh(*size), where)


@both_modes
def test_empty_shards_and_zero_sized_tensors(mode):
    on = mesh(4)
    for shape in ((1, 3), (3, 1), (5, 2), (0, 4), (4, 0)):
        x = torch.arange(float(math.prod(shape))).reshape(shape)
        for where in (S0, S1, R):
            d = spread(x, on, where)
            for op in (
                lambda t: t.sum(), lambda t: t.sum(0), lambda t: t * 2, lambda t: t @ t.t(), lambda t: t.t() @ t, lambda t: t.cumsum(0),
                lambda t: t.sort(0)[0], lambda t: torch.cat([t, t], 1), lambda t: t.flip(1), lambda t: t[t > 1], lambda t: t.reshape(-1),
                lambda t: t.softmax(1), lambda t: t.softmax(0), lambda t: t.mean(1),
            ):  # fmt: skip
                want = op(x)
                got = op(d)
                torch.testing.assert_close(full(got), want, equal_nan=True)
            d.add_(1).clamp_(max=3)
            same(d, (x + 1).clamp(max=3))


def test_views_as_other_dtypes():
    x = torch.randn(4, 6)
    for where in (S0, S1, R):
        d = spread(x, mesh(2), where)
        same(d.view(torch.int32), x.view(torch.int32))
        same(d.view(torch.float64) if where != S1 else d.redistribute(placements=[R]).view(torch.float64), x.view(torch.float64))
        same(d.view(torch.uint8), x.view(torch.uint8))
        same(d.view(torch.int16), x.view(torch.int16))
        same(torch.view_as_complex(d.view(4, 3, 2)), torch.view_as_complex(x.view(4, 3, 2)))
    c = torch.randn(4, 3, dtype=torch.complex64)
    d = spread(c, mesh(2), S0)
    for f in (torch.view_as_real, torch.real, torch.imag, torch.conj, lambda z: z.mH, lambda z: z.T.conj().imag):
        same(f(d), f(c))
    for f in (torch.angle, torch.abs, lambda z: z.conj() * z):
        close(f(d), f(c))
