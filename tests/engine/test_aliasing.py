"""Views, writes, indexing: every script gives the same values on plain tensors and on any placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import dtorch
from tests.engine.helpers import S0, S1, P, R, both_modes, close, full, layouts, mesh, same, spread

Script = Callable[[torch.Tensor], Any]
SCRIPTS: dict[str, Script] = {}


def script(f: Script) -> Script:
    """A function of a 6 x 4 tensor that returns what is to be compared."""
    SCRIPTS[f.__name__] = f
    return f


def agree(f: Script, x: torch.Tensor, on: dtorch.DeviceMesh, where: tuple[Any, ...]) -> None:
    """The script on a distributed copy of ``x`` gives what it gives on ``x``."""
    want = f(x.clone())
    got = f(spread(x.clone(), on, *where))
    for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if isinstance(w, torch.Tensor):
            same(g, w)
        else:
            assert g == w


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4)


# -- views and writes ----------------------------------------------------------------------------------------------
@script
def row_add(x):
    x[0].add_(1)
    return [x]


@script
def last_row_through_negative_index(x):
    x[-1].mul_(2)
    return [x, x[-1]]


@script
def column_fill(x):
    x[:, 1].fill_(5)
    return [x, x[1]]


@script
def strided_slice(x):
    v = x[::2, 1:]
    v.sub_(3)
    return [x, v, v.sum(0)]


@script
def write_to_the_base_shows_in_every_view(x):
    views = [x[1:4], x.t(), x.view(-1), x[:, 2], x.view(3, 2, 4), x[None], x.unfold(0, 2, 2), x.diagonal(), x.chunk(4)[2], x.T[1]]
    x.mul_(10)
    x[2, 3] = -1
    return [x, *views]


@script
def write_through_each_view(x):
    seen = []
    for i, v in enumerate((x[1:4], x.t(), x.view(-1), x[:, 2], x.view(3, 2, 4)[1], x[None], x.diagonal(), x[4])):
        v.add_(10.0**i)
        seen.append(v.clone())
    return [x, *seen]


@script
def chain_of_views(x):
    a = x[1:]
    b = a.t()
    c = b[1:3]
    d = c.reshape(2, 5)[0]
    d.fill_(7)
    c[1, 1] = 8
    a[0] = 9
    x[:, 3] -= 1
    return [x, a, b, c, d]


@script
def view_of_a_copied_view_and_back(x):
    top, bottom = x[:3], x[3:]
    inner = bottom[1]
    top.copy_(bottom)
    inner.zero_()
    x += 1
    bottom[2, ::2] = 100
    return [x, top, bottom, inner]


@script
def dropping_the_base(x):
    y = x * 1
    v = y[2:5]
    del y
    v.mul_(3)
    w = v[1]
    del v
    w.add_(1)
    return [w]


@script
def two_views_of_one_row(x):
    a, b = x[2], x[2:3]
    a.add_(1)
    b.mul_(2)
    a.sub_(3)
    return [x, a, b]


@script
def select_narrow_split(x):
    p, q, r = x.split(2)
    q.zero_()
    x.narrow(1, 1, 2).add_(1)
    x.select(0, 5).neg_()
    parts = x.unbind(1)
    parts[3].mul_(2)
    return [x, p, q, r, *parts]


@script
def expanded(x):
    e = x[:1].expand(3, 4)
    x[0] = 7
    return [e, e.sum(), x]


@script
def permuted_and_squeezed(x):
    v = x.view(6, 1, 4, 1).permute(2, 0, 3, 1).squeeze()
    v[0].add_(1)
    w = x.unsqueeze(0).squeeze(0)
    w.mul_(2)
    return [x, v, w]


@script
def flattened(x):
    f = x.flatten()
    f[5:9] = 0
    g = x.t().flatten()  # a copy
    g.zero_()
    return [x, f, g]


@script
def detach_shares_memory(x):
    d = x.detach()
    d[0, 0] = 50
    x.data.add_(1)
    return [x, d]


@script
def clone_does_not(x):
    c = x[1:3].clone()
    c.zero_()
    return [x, c]


@script
def swapped_rows(x):
    first = x[0].clone()
    x[0], x[5] = x[5].clone(), first
    x[[1, 2]] = x[[2, 1]]
    return [x]


@script
def overlapping_copy_through_a_clone(x):
    x[1:] = x[:-1].clone()
    return [x]


@script
def as_strided(x):
    v = x[1:].as_strided((2, 3), (4, 1), 5)
    v.add_(100)
    w = x.as_strided((4,), (6,))
    return [x, v, w, v.storage_offset(), x[2:].as_strided((2, 2), (4, 1)), x[3:].as_strided((2, 2), (4, 1), 0)]


@script
def bits_of_another_type(x):
    x.view(torch.int32)[0] += 1
    return [x, x.view(torch.uint8)[1]]


@script
def complex_parts(x):
    z = torch.view_as_complex(x.view(6, 2, 2))
    z.mul_(1j)
    z.real[2:4] = 3
    z.imag.add_(1)
    return [x, torch.view_as_real(z), z.conj().imag]


# -- in place ------------------------------------------------------------------------------------------------------
@script
def arithmetic(x):
    same_object = x.add_(1).mul_(2).sub_(x).clamp_(-1, 5).pow_(2) is x
    x -= 3
    x *= x
    x /= 2
    x **= 2
    x //= 3
    x %= 5
    return [x, same_object]


@script
def with_other_shapes(x):
    x += torch.arange(4.0)
    x *= x[0] + 1
    x.addcmul_(x, x, value=0.5).lerp_(torch.ones(6, 4), 0.25)
    x.addmm_(x, torch.eye(4))
    return [x]


@script
def relu_and_friends(x):
    torch.relu_(x.sub_(10))
    torch.nn.functional.leaky_relu(x.sub_(2), inplace=True)
    x.masked_fill_(x > 5, -1).exp_().log1p_().nan_to_num_().round_(decimals=2)
    return [x]


@script
def order_in_place(x):
    x.t_()
    y = x.clone()
    y.unsqueeze_(0).squeeze_(0).transpose_(0, 1)
    x.add_(1)
    return [x, y, x.shape, y.stride()]


@script
def triangles_and_fills(x):
    x.tril_().fill_diagonal_(9)
    x[3:].triu_(1)
    x.zero_().add_(1)
    return [x]


@script
def cumulative(x):
    x.cumsum_(0).cumprod_(1)
    return [x]


@script
def bigger_and_smaller(x):
    y = x.clone().resize_(3, 4)
    z = x.clone().resize_(2)
    w = torch.empty_like(x).resize_(0)
    return [y, z, w.shape, x]


@script
def set_to_another(x):
    y = torch.zeros_like(x)
    y.set_(x)
    y.add_(1)
    return [x, y]


# -- indexing ------------------------------------------------------------------------------------------------------
@script
def reading(x):
    rows, cols = torch.tensor([5, 0, 3]), torch.tensor([1, 1, 2])
    return [
        x[rows], x[rows, cols], x[:, cols], x[rows][:, cols], x[[0, -1]], x[(1, 2)], x[..., 1], x[None, 1], x[1, None], x[True],
        x[torch.tensor(2)], x[rows.view(3, 1), cols], x[1:5, cols], x[x > 11], x[x.sum(1) > 20], x[:, x[0] > 1], x[~(x > 3)],
        x[torch.tensor([], dtype=torch.long)], x[False], x[-1, -1], x[2:2], x[torch.tensor([True, False] * 3)],
        x[torch.tensor([True, False] * 3), 1], x.take(torch.tensor([0, 23, 7])), x.index_select(1, cols), x.gather(0, torch.zeros(1, 4).long()),
    ]  # fmt: skip


@script
def reading_with_their_own_values(x):
    order = x[:, 0].argsort(descending=True)
    return [x[order], x[order[:2], order[2:4] % 4], x[x[:, 1].long() % 6], torch.where(x > 7), x.nonzero(), x.argmax(1)]


@script
def writing(x):
    rows, cols = torch.tensor([5, 0, 3]), torch.tensor([1, 1, 2])
    x[rows] = 1
    x[rows, cols] = torch.tensor([7.0, 8.0, 9.0])
    x[:, cols[:2]] += 1
    x[2] = torch.arange(4.0)
    x[x > 20] = -1
    x[x.sum(1) < 0] = 5
    x[..., 0] = x[..., 1]
    x[1:3, 2:] = x[3:5, :2].clone()
    x[[0, 2], [1, 3]] *= -1
    x[torch.tensor([False, True] * 3), 2] = 77
    x[4, x[4] > 0] = 0.5
    x[0:0] = 3
    return [x]


@script
def index_operators(x):
    rows = torch.tensor([4, 1])
    x.index_fill_(0, rows, -5).index_add_(0, torch.tensor([0, 0]), torch.ones(2, 4)).index_copy_(1, torch.tensor([2]), torch.zeros(6, 1))
    x.scatter_(1, torch.tensor([[0], [3]]), 42).scatter_add_(0, torch.zeros(2, 4).long(), torch.ones(2, 4))
    x.index_put_((rows, rows - 1), torch.tensor(1.0), accumulate=True).masked_scatter_(x > 30, torch.arange(50.0))
    x.put_(torch.tensor([0, 5]), torch.tensor([3.5, 4.5])).masked_fill_(torch.eye(6, 4).bool(), 0)
    return [x, x.scatter(0, torch.tensor([[1, 2]]), 9), x.index_put((rows,), torch.ones(4))]


@script
def pieces_taken_and_joined(x):
    a, b = x.chunk(2)
    return [
        torch.cat([b, a]), torch.stack([a, b], 1), torch.hstack([a, b]), torch.vstack([x[0], x[1]]), x.tensor_split(4)[1], *x.hsplit(2),
        x.roll(1, 0), x.flip(0), x.rot90(), x.repeat(1, 2), x.tile(2), x.repeat_interleave(2, 0), torch.block_diag(a, b), x.movedim(0, 1),
    ]  # fmt: skip


# -- out= ----------------------------------------------------------------------------------------------------------
@script
def out_arguments(x):
    y, z = torch.empty_like(x), torch.empty_like(x)
    r = torch.add(x, 1, out=y)
    torch.mul(y, 2, out=z)
    values, indices = x.new_empty(4), x.new_empty(4).long()
    torch.max(x, 0, out=(values, indices))
    torch.matmul(x, x.t(), out=(m := x.new_empty(6, 6)))
    torch.cat([x, x], out=(c := x.new_empty(12, 4)))
    torch.sum(x, 1, out=(s := x.new_empty(6)))
    return [r is y, y, z, values, indices, m, c, s]


@script
def out_into_a_view(x):
    torch.add(x[0], x[1], out=x[5])
    torch.mul(x[:, 0], 2, out=x[:, 3])
    return [x]


@script
def out_of_another_dtype(x):
    y = torch.empty_like(x, dtype=torch.float64)
    torch.add(x, 0.5, out=y)
    return [y]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, table):
    for on in (mesh(2), mesh(4)):
        for where in layouts(2, on):
            agree(SCRIPTS[name], table, on, where)
    for where in ((S0, S0), (S0, S1), (S1, R), (P, S0), (P, P)):
        agree(SCRIPTS[name], table, mesh(2, 2), where)


@pytest.mark.parametrize("name", ["write_through_each_view", "chain_of_views", "view_of_a_copied_view_and_back", "reading", "writing",
                                  "index_operators", "out_arguments", "as_strided"])  # fmt: skip
@pytest.mark.parametrize("mode", ["local"], indirect=True)
def test_scripts_over_processes(mode, name, table):
    for where in ((S0,), (S1,), (P,), (R,)):
        agree(SCRIPTS[name], table, mesh(3), where)


# -- what torch says no to -----------------------------------------------------------------------------------------
def refused(kind: type[BaseException], f: Callable[[torch.Tensor], Any], pattern: str | None = None) -> None:
    x = torch.arange(24.0).reshape(6, 4)
    for where in (S0, R):
        d = spread(x, mesh(2), where)
        with pytest.raises(kind, match=pattern):
            f(d)
        same(d, x)
        same(d + 1, x + 1)


def test_refusals():
    refused(IndexError, lambda x: x[6])
    refused(IndexError, lambda x: x[0, 0, 0])
    refused(RuntimeError, lambda x: x.view(5, 5))
    refused(RuntimeError, lambda x: x.t().view(-1))
    refused(RuntimeError, lambda x: x.add_(torch.ones(5)))
    refused(RuntimeError, lambda x: x.add_(torch.ones(2, 6, 4)))
    refused(RuntimeError, lambda x: x.long().add_(0.5))
    refused(RuntimeError, lambda x: torch.add(x, 1, out=x.long()))
    refused(RuntimeError, lambda x: x[:1].expand(3, 4).add_(1))
    refused(TypeError, lambda x: x["a"])
    refused(RuntimeError, lambda x: x.__setitem__(0, torch.ones(3)))
    refused(RuntimeError, lambda x: torch.cat([x, torch.ones(2, 3)]))


def test_out_of_the_wrong_size_is_resized_with_a_warning(table):
    d = spread(table, mesh(2), S0)
    out = torch.empty_like(d)
    with pytest.warns(UserWarning, match="resized"):
        torch.sum(d, 0, out=out)
    same(out, table.sum(0))
    empty = d.new_empty(0)
    torch.sum(d, 0, out=empty)  # an empty one is made to be resized: no warning
    same(empty, table.sum(0))


# -- plain tensors among distributed ones --------------------------------------------------------------------------
@both_modes
def test_plain_tensors_join(mode, table):
    d = spread(table, mesh(2), S0)
    y = torch.randn(6, 4)
    same(d + y, table + y, [S0])
    same(y * d, y * table, [S0])
    close(d @ torch.eye(4), table @ torch.eye(4))
    same(torch.cat([d, y]), torch.cat([table, y]))
    same(torch.where(y > 0, d, y), torch.where(y > 0, table, y))
    same(d[torch.tensor([1, 2])], table[[1, 2]])
    close(torch.nn.functional.linear(y, d), torch.nn.functional.linear(y, table))
    same(d.add_(y), table + y)
    d[1] = torch.ones(4)
    d[0, 0] = torch.tensor(5)
    assert d[1].sum() == 4
    assert d[0, 0] == 5
    import numpy as np

    same(d + np.float32(1), full(d) + 1)
    same(d * np.int64(2), full(d) * 2)


@both_modes
def test_writing_into_plain_tensors_is_refused(mode, table):
    d = spread(table, mesh(2), S0)
    y = torch.zeros(6, 4)
    for write in (lambda: y.add_(d), lambda: torch.add(d, 1, out=y), lambda: y.addmm_(d, d.t()), lambda: y.index_add_(0, torch.arange(6), d)):
        with pytest.raises(RuntimeError, match=r"plain.*to_torch"):
            write()
    assert torch.equal(y, torch.zeros(6, 4))
    y.copy_(d)  # as from any other device
    y[0] = d[1]
    assert torch.equal(y[1:], table[1:])
    assert torch.equal(y[0], table[1])


@both_modes
def test_two_meshes_do_not_mix(mode, table):
    a, b = spread(table, mesh(2), S0), spread(table, mesh(3), S0)
    for mix in (lambda: a + b, lambda: torch.cat([a, b]), lambda: a.add_(b), lambda: a @ b.t(), lambda: torch.where(a > 0, b, a)):
        with pytest.raises(RuntimeError, match=r"same device mesh(?=.*\[0, 1\])(?=.*\[0, 1, 2\])"):
            mix()
    same(a + b.redistribute(mesh(2)), table * 2, [S0])
    same(a.copy_(b + 1), table + 1, [S0])
    same(a.to(b.device) + b, table * 2 + 1)


def test_copies_between_placements_meshes_and_dtypes(table):
    x = torch.randn(6, 4)
    for where in layouts(2, mesh(2)):
        for other, there in ((mesh(2), S0), (mesh(3), S1)):
            d = spread(table, mesh(2), *where)
            d.copy_(spread(x, other, there))
            same(d, x, where if not d.placements[0].is_replicate() else None)
            d.copy_(spread(torch.arange(4), other, R))
            same(d, torch.arange(4.0).expand(6, 4))
            d[1:3].copy_(x[:2])
            same(d[1:3], x[:2])
    d = spread(table.int(), mesh(2), S0)
    same(d.copy_(x * 10), (x * 10).int(), [S0])


def test_strides_are_in_elements_of_the_view():
    x = torch.arange(4).to(torch.complex64)
    for take in (torch.view_as_real, lambda t: t.view(torch.float32), lambda t: t.view(torch.int16)):
        base = spread(x, mesh(2))
        same(take(base).as_strided((3,), (2,), 1), take(x).as_strided((3,), (2,), 1))


# -- random programs -----------------------------------------------------------------------------------------------
VIEWS: list[Callable[[torch.Tensor, int], torch.Tensor]] = [
    lambda t, n: t.t() if t.dim() == 2 else t.flatten(),
    lambda t, n: t[n % len(t)] if t.dim() and len(t) else t,
    lambda t, n: t[n % 3 :] if t.dim() else t.view(1),
    lambda t, n: t[..., : n % 3 + 1] if t.dim() else t[None],
    lambda t, n: t[::2] if t.dim() else t.unsqueeze(0),
    lambda t, n: t.view(-1) if t.is_contiguous() else t.unsqueeze(-1),
    lambda t, n: t.unsqueeze(n % (t.dim() + 1)) if t.dim() < 4 else t.squeeze(),
    lambda t, n: t.chunk(2)[-1] if t.dim() and len(t) else t,
    lambda t, n: t.diagonal() if t.dim() >= 2 else t,
    lambda t, n: t.detach(),
]
WRITES: list[Callable[[torch.Tensor, int], Any]] = [
    lambda t, n: t.add_(n),
    lambda t, n: t.mul_(2),
    lambda t, n: t.fill_(n),
    lambda t, n: t.copy_(t.flip(0)) if t.dim() else t,
    lambda t, n: t.masked_fill_(t > n, -n),
    lambda t, n: t.__setitem__(0, n) if t.dim() and len(t) else t,
    lambda t, n: t.sub_(t.sum()),
    lambda t, n: t.cumsum_(0) if t.dim() else t,
]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    where=st.sampled_from([(S0,), (S1,), (P,), (R,)]),
    size=st.sampled_from([1, 2, 3]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9), st.integers(0, 7)), max_size=12),
)
def test_random_programs_of_views_and_writes(where, size, steps):
    x = torch.arange(15).reshape(5, 3)
    pools = [[x.clone()], [spread(x, mesh(size), *where)]]
    for is_view, what, which, n in steps:
        for pool in pools:
            t = pool[which % len(pool)]
            if is_view:
                pool.append(VIEWS[what](t, n))
            elif not (t.dim() == 2 and t.numel() > 15):
                WRITES[what % len(WRITES)](t, n)
    for d, t in zip(pools[1], pools[0], strict=True):
        assert d.stride() == t.stride()
        assert d.storage_offset() == t.storage_offset()
        same(d, t)
