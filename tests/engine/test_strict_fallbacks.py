"""Strict mode, and what is said of operators without a rule."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import dtorch
from dtorch.client import notices
from dtorch.core.errors import ImplicitRedistributionError
from dtorch.planner import rule
from tests.engine.helpers import S0, S1, P, R, both_modes, close, full, mesh, run_program, same, spread


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of one shape, cut along different dimensions."""
    return spread(torch.randn(6, 4), mesh(2), S0), spread(torch.randn(6, 4), mesh(2), S1)


@pytest.fixture
def no_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An operator of which nobody has warned yet, without its rule."""
    name = "aten.sort"
    monkeypatch.setattr(notices, "_counts", type(notices._counts)())
    monkeypatch.setattr(rule, "_RULES", {k: v for k, v in rule._RULES.items() if not k.startswith(name)})
    dtorch.shutdown()  # plans made with the rule
    dtorch.init(mode="inline")
    yield name
    dtorch.shutdown()


def test_the_error_names_operator_placements_and_the_legal_ones(pair):
    a, b = pair
    cases = [
        (lambda: a + b, "aten.add.Tensor", "[Shard(dim=0)], [Shard(dim=1)]",
         ["Shard(dim=0), Shard(dim=0) -> Shard(dim=0)", "Shard(dim=1), Shard(dim=1) -> Shard(dim=1)", "Partial(sum), Partial(sum) -> Partial(sum)",
          "Replicate(), Replicate() -> Replicate()"]),
        (lambda: a @ a.t(), "aten.m", "[Shard(dim=0)], [Shard(dim=1)]",
         ["Shard(dim=0), Replicate() -> Shard(dim=0)", "Replicate(), Shard(dim=1) -> Shard(dim=1)", "Shard(dim=1), Shard(dim=0) -> Partial(sum)"]),
        (lambda: a.sort(0), "aten.sort", "[Shard(dim=0)]", ["Shard(dim=1) -> Shard(dim=1), Shard(dim=1)"]),
        (lambda: a.add_(b), "aten.add_.Tensor", "[Shard(dim=0)], [Shard(dim=1)]", ["Shard(dim=0), Shard(dim=0) -> Shard(dim=0)"]),
    ]  # fmt: skip
    for call, operator, have, legal in cases:
        with dtorch.strict(), pytest.raises(ImplicitRedistributionError) as caught:
            call()
        for part in (operator, have, *legal):
            assert part in str(caught.value)
    same(a, full(a), [S0])


def test_the_legal_ones_are_legal(pair):
    a, b = pair
    with dtorch.strict():
        same(a + b.redistribute(placements=[S0]), full(a) + full(b), [S0])
        same(a.redistribute(placements=[S1]) + b, full(a) + full(b), [S1])
        close(b @ spread(torch.eye(4), mesh(2), S0), full(b))
        same(b.sort(0).values, full(b).sort(0).values, [S1])
        out = (a * 2 + 1).relu().sum(1).view(2, 3).t()
    same(out, (full(a) * 2 + 1).relu().sum(1).view(2, 3).t(), [S1])


def test_what_is_hidden(pair):
    a, b = pair
    terms = b.sum(1)
    assert terms.placements == (P,)
    hidden = [
        lambda: terms * terms, lambda: torch.cat([a, b]), lambda: a[0], lambda: a[1:], lambda: a.flip(0), lambda: a.unique(), lambda: a.view(-1, 8),
        lambda: a.copy_(b), lambda: torch.where(a > 0, a, b), lambda: a[torch.tensor([0, 1])], lambda: a.cumsum(0), lambda: a.softmax(0),
    ]  # fmt: skip
    for call in hidden:
        with dtorch.strict(), pytest.raises(ImplicitRedistributionError):
            call()
    with dtorch.strict():
        assert terms.placements == (P,)
        # What is asked for is not hidden.
        close(terms, full(b).sum(1))
        a.redistribute(placements=[R])
        a.to_torch()
        assert isinstance(a.sum().item(), float)
        spread(torch.ones(6, 4), mesh(2), S0) + a
        a.full_tensor()


def test_an_operator_that_runs_in_the_client(monkeypatch):
    monkeypatch.setattr(notices, "_counts", type(notices._counts)())
    x = torch.rand(40, 2)
    d = spread(x, mesh(2), S0)
    with dtorch.strict(), pytest.raises(ImplicitRedistributionError, match="gather them in the client"):
        torch.histogramdd(d, [3, 4])
    same(torch.histogramdd(d, [3, 4]).hist, torch.histogramdd(x, [3, 4]).hist)
    assert not dtorch.fallbacks(), "its rule says that it needs all values, so none is missing"


@torch.library.custom_op("dtorch_tests::twice", mutates_args=("log",))
def twice(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    """An operator of the user's, which workers do not know."""
    log.add_(1)
    return x * 2


@twice.register_fake
def _(x: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@both_modes
def test_an_operator_of_the_users(mode):
    x = torch.randn(6, 4)
    d, log = spread(x, mesh(2), S0), spread(torch.zeros(5), mesh(2), S0)
    for i in range(2):
        same(twice(d, log), 2 * x, [R])
        same(log, torch.full((5,), i + 1.0), [S0])
    same(twice(d[1:3], log[1:4]), 2 * x[1:3])
    same(log, torch.tensor([2.0, 3, 3, 3, 2]))


def test_on_and_off(pair):
    a, b = pair
    dtorch.strict()
    try:
        with pytest.raises(ImplicitRedistributionError):
            a + b
        with dtorch.strict(False):
            a + b
        with pytest.raises(ImplicitRedistributionError):
            a + b
    finally:
        dtorch.strict(False)
    a + b
    with pytest.raises(ZeroDivisionError), dtorch.strict():
        1 / 0
    a + b
    with dtorch.strict():  # a plan that is in use already
        with pytest.raises(ImplicitRedistributionError):
            a + b
        with pytest.raises(ImplicitRedistributionError):
            a + b


@both_modes
def test_strict_sessions(mode):
    own = dtorch.Graph(mode="inline", strict=True)
    with own:
        m = dtorch.DeviceMesh("cpu", [0, 1])
        a, b = spread(torch.ones(4, 4), m, S0), spread(torch.ones(4, 4), m, S1)
        with pytest.raises(ImplicitRedistributionError):
            a + b
        same(a + a, torch.full((4, 4), 2.0), [S0])
    a, b = spread(torch.ones(4, 4), mesh(2), S0), spread(torch.ones(4, 4), mesh(2), S1)
    same(a + b, torch.full((4, 4), 2.0))
    own.close()


def test_two_axes():
    m = mesh(2, 2)
    a, b = spread(torch.randn(4, 4), m, S0, S1), spread(torch.randn(4, 4), m, S0, R)
    with dtorch.strict(), pytest.raises(ImplicitRedistributionError, match="Legal on each mesh axis: "):
        a @ b
    with dtorch.strict():
        same(a + a, full(a) * 2, [S0, S1])


def test_one_device_is_never_refused():
    d = spread(torch.randn(4, 4), mesh(1), R)
    with dtorch.strict():
        same(d.sort(0).values.cumsum(1)[0], full(d).sort(0).values.cumsum(1)[0])


def test_a_fallback_is_right_counted_and_warned_of_once(no_rule):
    x = torch.randn(6, 4)
    d = spread(x, mesh(2), S0)
    assert dtorch.fallbacks() == {}
    with pytest.warns(dtorch.FallbackWarning, match=r"aten\.sort.*no placement rule.*gathered.*replicated") as seen:
        got = d.sort(1)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    same(got.values, x.sort(1).values, [R])
    same(got.indices, x.sort(1).indices, [R])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            d.sort(1)
        d.t().sort(0)
    counts = dtorch.fallbacks()
    assert sum(counts.values()) == 5
    assert all(name.startswith("aten.sort") for name in counts)
    counts.clear()
    assert sum(dtorch.fallbacks().values()) == 5
    spread(x, mesh(2), R).sort(1)  # replicated already: nothing is gathered
    assert sum(dtorch.fallbacks().values()) == 5
    with dtorch.strict(), pytest.raises(ImplicitRedistributionError, match=r"aten\.sort.*Legal here: Replicate\(\) -> Replicate\(\)"):
        d.sort(1)


def test_results_keep_their_placement():
    """Of the operators that models consist of; each family's own tests say more."""
    on = mesh(2)
    x, w = torch.randn(4, 6, 8), torch.randn(8, 8)
    d, e = spread(x, on, S0), spread(w, on, R)
    f = torch.nn.functional
    kept = [
        d + 1, d * d, d.relu(), d.softmax(-1), f.layer_norm(d, (8,)), d @ e, f.linear(d, e), d.transpose(1, 2), d.view(4, 48), d.sum(-1),
        d.mean(1), d[..., 0], d[:, 2:4], d.chunk(2, -1)[1], torch.cat([d, d], -1), d.unsqueeze(1).expand(4, 3, 6, 8), d.float().to(torch.bfloat16),
        f.scaled_dot_product_attention(d[:, None], d[:, None], d[:, None]), d.cumsum(1), d.sort(1)[0], d.topk(2)[1], d.masked_fill(d > 0, 1),
        f.gelu(d), f.silu(d), d.std(-1), torch.einsum("bij,jk->bik", d, e), d.argmax(-1), d.clamp(0, 1), f.pad(d, (1, 1)), d.roll(1, 1),
    ]  # fmt: skip
    for i, out in enumerate(kept):
        assert out.placements == (S0,), f"number {i}"
    assert d.sum(0).placements == (P,)
    assert (d.t() if d.dim() == 2 else d.transpose(0, 1)).placements == (S1,)
    assert f.linear(spread(x, on, dtorch.Shard(2)), spread(w, on, S1)).placements == (P,)
    assert f.linear(spread(x, on, R), spread(w, on, S0)).placements == (dtorch.Shard(2),)


def test_a_partial_tensor_is_reduced_once():
    on = mesh(2)
    d = spread(torch.randn(4, 6), on, S1)
    terms = d.sum(1)
    assert terms.placements == (P,)
    a = terms.exp()
    assert terms.placements == (R,)  # itself re-placed: the next consumer pays nothing
    with dtorch.strict():
        b = terms.cos()
    close(a, full(d).sum(1).exp())
    close(b, full(d).sum(1).cos())


def test_warnings_of_a_whole_program_are_few(tmp_path):
    done = run_program(
        "import torch, dtorch\nm = dtorch.DeviceMesh('cpu', [0, 1])\nwith m, torch.device('dtorch'):\n"
        "    net = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)\n"
        "opt = torch.optim.AdamW(net.parameters())\nx = dtorch.randn(4, 5, 8, device_mesh=m, placements=[dtorch.Shard(0)])\n"
        "for _ in range(2):\n    loss = net(x).square().mean()\n    loss.backward()\n    opt.step()\n    opt.zero_grad()\nprint(loss.item() > 0)\n",
        tmp_path, mode="inline",
    )  # fmt: skip
    assert done.stdout == "True\n"
    assert done.stderr == ""
