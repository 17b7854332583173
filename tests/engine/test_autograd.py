"""torch.autograd above distributed tensors: gradients are torch's, and carry placements."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dtorch
from tests.engine.helpers import S0, S1, P, R, both_modes, close, full, layouts, mesh, same, spread

F = torch.nn.functional
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "arithmetic": lambda x, w: (x * 2 + x / 3 - x**2).sum(),
    "broadcast": lambda x, w: (x * w[0] + w[1]).square().sum(),
    "matmul": lambda x, w: (x @ w).tanh().sum(),
    "linear": lambda x, w: F.linear(x, w, w[0]).relu().sum(),
    "softmax": lambda x, w: (x.softmax(-1) * w[:, :1].t()).sum(),
    "log_softmax": lambda x, w: F.nll_loss(x.log_softmax(0), torch.tensor([0, 1, 2, 3, 0, 1])),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.tensor([0, 1, 2, 3, 0, 1])),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]).square().sum(),
    "reductions": lambda x, w: x.mean() + x.var(0).sum() + x.amax(1).sum() + x.norm() + x.prod(1).sum() + x.logsumexp(0).sum(),
    "views": lambda x, w: (x.t()[1:3].reshape(-1) * torch.arange(12.0)).sum() + x.view(3, 8).select(1, 2).sum() + x.diagonal().sum(),
    "indexing": lambda x, w: (x[torch.tensor([0, 0, 5])] * w[:3]).sum() + x[x > 0].sum() + x[1:4, ::2].square().sum(),
    "gather": lambda x, w: x.gather(1, torch.tensor([[0, 1], [2, 3], [0, 0], [1, 1], [3, 2], [2, 2]])).square().sum(),
    "cat and split": lambda x, w: sum((i + 1) * part.square().sum() for i, part in enumerate(torch.cat([x, w]).split([3, 4, 3]))),
    "where": lambda x, w: torch.where(x > 0, x * 2, x.exp()).sum() + x.clamp(-0.5, 0.5).sum() + x.masked_fill(x < 0, 1).prod(),
    "sort and topk": lambda x, w: (x.sort(0).values * torch.arange(24.0).view(6, 4)).sum() + x.topk(2).values.square().sum() + x.max(0).values.sum(),
    "cumulative": lambda x, w: x.cumsum(0).square().sum() + x.cumprod(1).sum(),
    "in place": lambda x, w: (x * 1).add_(1).mul_(x).relu_().sum(),
    "write to a view": lambda x, w: _write_to_view(x),
    "write to a copied view": lambda x, w: _write_to_rows(x),
    "index put": lambda x, w: (x * 1).index_put((torch.tensor([1, 2]),), w[0] * 2).square().sum(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], (x @ w)[None, None], x[None, None]).square().sum(),
    "embedding": lambda x, w: F.embedding(torch.tensor([0, 5, 5, 1]), x).square().sum(),
    "conv": lambda x, w: F.conv1d(x.t()[None], w[:, :, None]).square().sum(),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True).square().sum() + x.sum(),
    "gelu silu": lambda x, w: F.gelu(x).sum() + F.silu(x).sum() + F.softplus(x).sum() + F.elu(x).sum(),
    "einsum": lambda x, w: torch.einsum("ij,jk,ik->", x, w, x),
    "stack unbind": lambda x, w: torch.stack(list(x.unbind(1))[::-1]).square()[1:].sum(),
    "expand repeat": lambda x, w: x[:, :1].expand(6, 3).square().sum() + x.repeat(2, 1)[3:9].square().sum(),
    "complex": lambda x, w: torch.view_as_real(torch.view_as_complex(x.reshape(6, 2, 2)) ** 2).sum(),
    "solve": lambda x, w: torch.linalg.solve(w + 5 * torch.eye(4), x.t()).square().sum(),
    "losses": lambda x, w: F.mse_loss(x, x.detach() + 1) + F.l1_loss(x, x.detach() - 2) + F.smooth_l1_loss(x, x.detach() + 3),
}  # fmt: skip


def _write_to_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1].mul_(x[:, 0])
    y.t()[2].add_(3)
    return y.square().sum()


def _write_to_rows(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[2:5].mul_(3)
    y[0] = x[1] * 2
    v = y[1:]
    v[::2].sigmoid_()
    return (y * torch.arange(24.0).view(6, 4)).sum()


def inputs() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randn(6, 4, generator=g), torch.randn(4, 4, generator=g)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_torchs(name):
    f = FUNCTIONS[name]
    plain = [t.requires_grad_() for t in inputs()]
    want = torch.autograd.grad(f(*plain), plain, allow_unused=True)
    for on, places in (
        (mesh(2), [(S0, R), (S1, S0), (R, S1), (R, R)]),
        (mesh(3), [(S0, S0), (S1, R)]),
        (mesh(2, 2), [((S0, S1), (R, S0)), ((R, S0), (S1, S1))]),
    ):
        for row in places:
            where = [p if isinstance(p, tuple) else (p,) for p in row]
            given = [spread(t, on, *p).requires_grad_() for t, p in zip(inputs(), where, strict=True)]
            out = f(*given)
            got = torch.autograd.grad(out, given, allow_unused=True)
            torch.testing.assert_close(full(out), f(*plain).detach(), rtol=1e-4, atol=1e-4)
            for g, w in zip(got, want, strict=True):
                assert (g is None) == (w is None)
                if w is not None:
                    assert isinstance(g, dtorch.DTensor)
                    torch.testing.assert_close(full(g), w, rtol=1e-3, atol=1e-4)


@both_modes
def test_gradients_carry_placements(mode):
    x, w = inputs()
    for where, wheres in (((S0,), (R,)), ((S1,), (S0,)), ((R,), (S1,))):
        a, b = spread(x, mesh(2), *where).requires_grad_(), spread(w, mesh(2), *wheres).requires_grad_()
        (a @ b).square().sum().backward()
        assert a.grad.shape == a.shape
        assert a.grad.placements[0].is_shard() == where[0].is_shard() or a.grad.placements == (P,)
    a = spread(x, mesh(2), S0).requires_grad_()
    b = spread(w, mesh(2), R).requires_grad_()
    (a @ b).sum().backward()
    assert b.grad.placements == (P,)  # reduced when needed, not before
    again = b.grad
    (a @ b).sum().backward()
    assert b.grad is again  # accumulated in place
    close(b.grad, 2 * (x.t() @ torch.ones(6, 4)))


@both_modes
def test_through_conversions(mode):
    x = torch.randn(5, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    d = dtorch.Tensor(x, device_mesh=mesh(2), placements=[S0])
    out = (d * d).redistribute(placements=[S1]).redistribute(mesh(3), [S0]).full_tensor()
    assert type(out) is torch.Tensor
    (out.sin().sum()).backward()
    (y * y).sin().sum().backward()
    assert type(x.grad) is torch.Tensor
    torch.testing.assert_close(x.grad, y.grad)
    leaf = spread(y.detach(), mesh(2), S1).requires_grad_()
    for read in (lambda t: t.full_tensor(), lambda t: t.cpu(), lambda t: t.to("cpu", torch.float64), lambda t: t.to_local(0).sum() + t.to_local(1).sum()):
        leaf.grad = None
        read(leaf * 3).sum().backward()
        same(leaf.grad, torch.full((5, 3), 3.0))
    assert not leaf.to_torch().requires_grad
    moved = dtorch.distribute_tensor(x, mesh(2), [S0])
    assert moved.grad_fn is not None
    half = leaf.to(torch.float16)
    half.sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_double_backward():
    x, w = (t.double() for t in inputs())
    for on, where in ((mesh(2), (S0,)), (mesh(3), (S1,)), (mesh(2), (R,))):
        plain, d = x.clone().requires_grad_(), spread(x, on, *where).requires_grad_()
        results = []
        for t in (plain, d):
            y = (t @ (w if t is plain else spread(w, on, R))).tanh().square().sum() + t.redistribute(placements=[R]).pow(3).sum() if t is d else (t @ w).tanh().square().sum() + t.pow(3).sum()
            (g,) = torch.autograd.grad(y, t, create_graph=True)
            (h,) = torch.autograd.grad((g * g).sum(), t)
            results.append((full(g), full(h)))
        torch.testing.assert_close(results[1], results[0])
    d = spread(x, mesh(2), S0).requires_grad_()
    (g,) = torch.autograd.grad(d.full_tensor().pow(3).sum() + d.to_local(1).pow(3).sum(), d, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), d)
    want = 6 * x.clone()
    want[3:] *= 2
    torch.testing.assert_close(full(h), want)


def test_gradcheck():
    on = mesh(2)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def through(f: Callable[[Any], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: f(dtorch.Tensor(t, device_mesh=on, placements=[S0])).full_tensor()

    for f in (lambda d: d.softmax(0), lambda d: (d @ d.t())[1:], lambda d: d.redistribute(placements=[S1]).cumsum(0), lambda d: d.var(0)):
        assert torch.autograd.gradcheck(through(f), x)
        assert torch.autograd.gradgradcheck(through(f), x)


def test_hooks():
    on = mesh(2)
    d = spread(torch.ones(4, 3), on, S0).requires_grad_()
    seen = []
    y = d * 2
    y.register_hook(lambda g: seen.append(g) or g * 10)
    d.register_hook(lambda g: g + 1)
    d.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    y.sum().backward()
    same(seen[0], torch.ones(4, 3))
    same(d.grad, torch.full((4, 3), 21.0))
    same(seen[1], torch.full((4, 3), 21.0))
    y = d * 3
    y.retain_grad()
    y.sum().backward()
    same(y.grad, torch.ones(4, 3))
    net = torch.nn.Linear(3, 2).to(d.device)
    order = []
    net.register_forward_pre_hook(lambda m, a: order.append("before"))
    net.register_forward_hook(lambda m, a, out: order.append("after"))
    net.register_full_backward_hook(lambda m, gi, go: order.append("backward"))
    net(d).sum().backward()
    assert order == ["before", "after", "backward"]


class Cube(torch.autograd.Function):
    """A user's function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        ctx.k = k
        return k * x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return g * 3 * ctx.k * x**2, None


@both_modes
def test_custom_functions(mode):
    x = torch.randn(4, 3)
    d = spread(x, mesh(2), S0).requires_grad_()
    Cube.apply(d, 2.0).sum().backward()
    close(d.grad, 6 * x**2)
    assert d.grad.placements == (S0,)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Fails.apply(d).sum().backward()
    d.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (d * 2).sum().backward()
    same(d.detach() + 1, x + 1)


@both_modes
@pytest.mark.parametrize("where", [1, 2, 3])
def test_errors_within_backward_on_every_mesh(mode, where):
    meshes = [mesh(1), mesh(2), mesh(3), mesh(2, 2)]
    for m in meshes:
        dtorch.zeros(1, device_mesh=m)
    x = torch.randn(4, 4)
    d = spread(x, meshes[where], *(S0, R)[: meshes[where].ndim]).requires_grad_()

    def recomputed(t: torch.Tensor) -> torch.Tensor:
        if calls.append(1) or len(calls) > 1:
            raise ValueError("in recomputation")
        return t.tanh()

    calls: list[int] = []
    with pytest.raises(ValueError, match="in recomputation"):
        checkpoint(recomputed, d, use_reentrant=False).sum().backward()
    y = d * 2
    with torch.no_grad():
        y_used = y.exp()
    del y_used
    z = y.exp()
    z.add_(1)  # saved for backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        w = d.exp().sum()
        w.backward()
        w.backward()
    with pytest.raises(RuntimeError, match="scalar outputs"):
        (d * 2).backward()
    d.grad = None
    (d * 2).sum().backward()
    close(d.grad, torch.full((4, 4), 2.0))


def test_views_and_versions_as_torch():
    for where in (S0, S1, R):
        leaf = spread(torch.ones(4, 3), mesh(2), where).requires_grad_()
        with pytest.raises(RuntimeError, match="leaf Variable"):
            leaf.add_(1)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            leaf[0].add_(1)
        with torch.no_grad():
            leaf[0].add_(1)
        assert full(leaf)[0].tolist() == [2, 2, 2]
        y = leaf * 1
        v = y[1:3]
        assert v._base is y
        assert v._is_view()
        before = y._version
        v.mul_(2)
        assert y._version == v._version > before
        y.sum().backward()
        want = torch.ones(4, 3)
        want[1:3] = 2
        same(leaf.grad, want)
        d = leaf.detach()
        assert not d.requires_grad
        assert d._version == leaf._version


def test_modes():
    d = spread(torch.ones(4, 3), mesh(2), S0).requires_grad_()
    with torch.no_grad():
        assert not (d * 2).requires_grad
    with torch.inference_mode():
        y = d * 2
        y.add_(1)
        assert y.is_inference()
        z = d[1:]
        same(z * 1, torch.ones(3, 3))
        same(y[0], torch.full((3,), 3.0))
    with pytest.raises(RuntimeError, match="[Ii]nference"):
        (d * y).sum().backward()
    with torch.enable_grad():
        assert (d * 2).requires_grad
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan"):
        warnings.simplefilter("ignore")  # it prints the forward call
        (d * 0 / 0).sqrt().sum().backward()


@both_modes
@pytest.mark.filterwarnings(r"ignore:.torch\.jit\.script. is deprecated:DeprecationWarning")
def test_func_transforms(mode):
    x = torch.randn(4, 3)
    d = spread(x, mesh(2), S0)
    close(torch.func.grad(lambda t: t.sin().sum())(d), x.cos())
    close(torch.func.vmap(lambda row: row.softmax(0))(d), x.softmax(1))
    value, vjp = torch.func.vjp(lambda t: t * t, d)
    close(vjp(torch.ones_like(value))[0], 2 * x)
    close(torch.func.jvp(torch.sin, (d,), (torch.ones_like(d),))[1], x.cos())
    net = torch.nn.Linear(3, 2).to(d.device)
    out = torch.func.functional_call(net, {k: v * 2 for k, v in net.state_dict().items()}, (d,))
    close(out, x @ (2 * full(net.weight)).t() + 2 * full(net.bias))


@both_modes
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(mode, reentrant):
    x, w = inputs()
    a, b = spread(x, mesh(2), S0).requires_grad_(), spread(w, mesh(2), R).requires_grad_()

    def block(t: torch.Tensor) -> torch.Tensor:
        return F.dropout((t @ b).tanh(), 0.3)

    torch.manual_seed(3)
    checkpoint(block, a, use_reentrant=reentrant).square().sum().backward()
    with_checkpoint = full(a.grad), full(b.grad)
    a.grad = b.grad = None
    torch.manual_seed(3)
    block(a).square().sum().backward()
    torch.testing.assert_close(with_checkpoint, (full(a.grad), full(b.grad)))


@both_modes
def test_training_steps_are_torchs(mode):
    def train(move: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        data, target = torch.randn(6, 4), torch.randn(6, 2)
        net = move(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.mse_loss(net(move(data)), move(target))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
        return [full(p) for p in net.parameters()] + [full(loss.detach())]

    want = train(lambda v: v)
    on = mesh(2)
    with on:
        same_bits = train(lambda v: v.to("dtorch"))
    torch.testing.assert_close(same_bits, want, rtol=0, atol=0)
    cut = train(lambda v: spread(v, on, S0) if isinstance(v, torch.Tensor) else v.to(dtorch.zeros(1, device_mesh=on).device))
    torch.testing.assert_close(cut, want, rtol=1e-3, atol=1e-4)


def test_every_placement_of_a_leaf():
    x = torch.randn(3, 3)
    for where in layouts(2, mesh(2, 2), partial=False):
        d = spread(x, mesh(2, 2), *where).requires_grad_()
        (d * d).sum().backward()
        same(d.grad, 2 * x, where)
