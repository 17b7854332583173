"""Complete training steps as one record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from tests.engine.helpers import S0, R, both_modes, full, mesh, spread

pytestmark = [both_modes, pytest.mark.filterwarnings("error")]


def network(dropout: float) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )


def batches(steps: int):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=g), torch.randn(6, 4, generator=g)) for _ in range(steps)]


def train(net, optimizer, data, capture, zero=True):
    def step(x, y):
        if zero is not None:
            optimizer.zero_grad(set_to_none=zero)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    f = dtorch.capture(step) if capture else step
    torch.manual_seed(7)
    losses = [float(f(x, y).detach()) for x, y in data]
    return losses, f


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_adamw(mode, zero, dropout):
    runs = []
    for capture in (False, True):
        net = network(dropout).to("dtorch")
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=True)
        data = [(x.to("dtorch"), y.to("dtorch")) for x, y in batches(10)]
        losses, f = train(net, optimizer, data, capture, zero)
        state = [full(v) for s in optimizer.state.values() for v in s.values()]
        runs.append((losses, [full(p) for p in net.parameters()], [full(p.grad) for p in net.parameters()], state))
    assert f.replays >= 6 and not f.refusals
    assert runs[0][0] == runs[1][0]
    for a, b in zip(runs[0][1:], runs[1][1:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_sgd_is_torch_to_the_bit(mode):
    data = batches(10)
    plain = network(0.2)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), data, False)
    net = network(0.2).to("dtorch")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    _, f = train(net, optimizer, [(x.to("dtorch"), y.to("dtorch")) for x, y in data], True)
    assert f.replays >= 6
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(full(p), q)


def test_gradients_left_for_the_caller(mode):
    net, plain = network(0.0).to("dtorch"), network(0.0)

    @dtorch.capture
    def backward(x, y):
        F.mse_loss(net(x), y).backward()

    kept = None
    for i, (x, y) in enumerate(batches(8)):
        F.mse_loss(plain(x), y).backward()
        backward(x.to("dtorch"), y.to("dtorch"))
        grads = [full(p.grad) for p in net.parameters()]
        assert all(torch.equal(a, p.grad) for a, p in zip(grads, plain.parameters(), strict=True)), i
        if i == 3:
            kept, want = net[0].weight.grad, grads[0]
        if i != 4:  # once they add up
            net.zero_grad()
            plain.zero_grad()
    assert torch.equal(full(kept), want)
    assert backward.replays >= 3


def test_gradients_of_arguments(mode):
    on = mesh(2)
    w = spread(torch.randn(4, 4), on, S0)

    @dtorch.capture
    def f(x):
        (x @ w).square().sum().backward()

    for _ in range(4):
        value = torch.randn(3, 4)
        x, want = spread(value, on, R).requires_grad_(), value.clone().requires_grad_()
        f(x)
        (want @ full(w)).square().sum().backward()
        torch.testing.assert_close(full(x.grad), want.grad)
    assert f.replays == 2


def test_writes_are_counted_for_autograd(mode):
    on = mesh(1)
    w = spread(torch.ones(3), on)
    f = dtorch.capture(lambda x: w.add_(x))
    for _ in range(3):
        f(spread(torch.ones(3), on))
    x = spread(torch.ones(3), on).requires_grad_()
    y = (x * w).sum()
    f(spread(torch.ones(3), on))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters(mode, register):
    net = torch.nn.Linear(2, 2).to("dtorch")
    x = torch.ones(1, 2, device="dtorch")

    @dtorch.capture
    def f():
        net.zero_grad()
        net(x).sum().backward()

    def hook(t):
        if register == "register_hook":
            return t * 2
        t.grad.mul_(2)
        return None

    handle = None
    for i in range(12):
        f()
        assert full(net.bias.grad).tolist() == [2.0 if 3 < i <= 7 else 1.0] * 2, i
        if i == 3:
            handle = getattr(net.bias, register)(hook)
        if i == 7:
            handle.remove()
    assert f.replays >= 3 and not f.refusals


def test_a_learning_rate_that_changes(mode):
    net = network(0.0).to("dtorch")
    plain = network(0.0)
    ours, theirs = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(net, optimizer, x, y):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    f = dtorch.capture(step)
    for i, (x, y) in enumerate(batches(12)):
        if i == 6:
            ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.5
        step(plain, theirs, x, y)
        f(net, ours, x.to("dtorch"), y.to("dtorch"))
        assert all(torch.equal(full(p), q) for p, q in zip(net.parameters(), plain.parameters(), strict=True)), i
    assert f.replays >= 4 and not f.refusals


def test_a_step_whose_numbers_change_runs_as_it_is(mode):
    net, plain = network(0.0).to("dtorch"), network(0.0)
    data = batches(7)
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), data, False)
    with pytest.warns(dtorch.CaptureWarning, match="cannot be captured"):
        _, f = train(
            net, torch.optim.AdamW(net.parameters(), lr=1e-2), [(x.to("dtorch"), y.to("dtorch")) for x, y in data], True
        )
    assert f.replays == 0
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(p), q)


def test_a_result_with_a_derivative_runs_as_it_is(mode):
    net = network(0.0).to("dtorch")
    f = dtorch.capture(net)
    x, _ = batches(1)[0]
    with pytest.warns(dtorch.CaptureWarning, match="needs a derivative"):  # noqa: PT031
        for _ in range(4):
            net.zero_grad()
            f(x.to("dtorch")).sum().backward()
    assert net[0].weight.grad is not None and f.replays == 0
    with torch.no_grad():
        for _ in range(4):
            f(x.to("dtorch"))
    assert f.replays == 2
