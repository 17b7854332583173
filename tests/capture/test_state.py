"""What a function reads beside its arguments may be replaced or changed at any time."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import dtorch
from tests.engine.helpers import both_modes, full, mesh, spread

pytestmark = [both_modes, pytest.mark.filterwarnings("error")]
SCALE = 2.0


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        self.dropout, self.factor, self.options = torch.nn.Dropout(0.5), 1.5, {"shift": 0.5}
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        return self.dropout(F.relu(self.norm(self.linear(x)))) * self.factor + self.offset + self.options["shift"]


CHANGES = {
    "parameter": lambda m: setattr(m.linear, "weight", torch.nn.Parameter(m.linear.weight * 2)),
    "parameter's data": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data * 2),
    "parameter in place": lambda m: m.linear.weight.mul_(2),
    "loaded": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
    "buffer": lambda m: setattr(m, "offset", m.offset * 3),
    "number": lambda m: setattr(m, "factor", 0.25),
    "entry": lambda m: m.options.update(shift=2.0),
    "module": lambda m: setattr(m, "dropout", torch.nn.Identity()),
    "flag": lambda m: m.eval(),
    "type": lambda m: m.double() and None,
    "hook": lambda m: m.linear.register_forward_hook(lambda module, args, out: out * 2) and None,
    "global": lambda m: globals().update(SCALE=5.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(mode, change, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    torch.manual_seed(0)
    on = mesh(1)
    plain = Block()
    with on:
        module = copy.deepcopy(plain).to("dtorch")

        def run(m, x):
            return m(x) * SCALE

        f = dtorch.capture(lambda x: run(module, x))
        value = torch.randn(3, 4)
        with torch.no_grad():
            torch.manual_seed(1)
            wants = [run(plain, value) for _ in range(4)]
            torch.manual_seed(1)
            for want in wants:
                assert torch.equal(full(f(spread(value, on))), want)
            assert f.replays == 2
            CHANGES[change](module)
            CHANGES[change](plain)
            value = value.to(plain.linear.weight.dtype)
            torch.manual_seed(2)
            wants = [run(plain, value) for _ in range(4)]
            torch.manual_seed(2)
            for want in wants:
                torch.testing.assert_close(full(f(spread(value, on))), want)
            for a, b in zip(module.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(full(a), b)
    assert f.replays >= 4 and not f.refusals


def test_training_and_evaluation_in_turn(mode):
    on = mesh(1)
    plain = Block()
    with on:
        module = copy.deepcopy(plain).to("dtorch")
    f = dtorch.capture(module)
    value = torch.randn(3, 4)
    with torch.no_grad():
        for training in (True, False) * 4:
            torch.manual_seed(3)
            want = plain.train(training)(value)
            torch.manual_seed(3)
            module.train(training)
            torch.testing.assert_close(full(f(spread(value, on))), want)
    assert f.replays == 4 and f.recordings == 4


def test_closures(mode):
    on = mesh(1)
    w = spread(torch.ones(2), on)
    k = 1.0

    @dtorch.capture
    def f(x):
        return x * w + k

    for i in range(12):
        assert full(f(spread(torch.ones(2), on))).tolist() == [float(full(w)[0]) + k] * 2
        if i == 3:
            w = spread(torch.full((2,), 5.0), on)
        if i == 7:
            k = 3.0
    assert f.replays == 6 and f.recordings == 6


def test_a_tensor_that_is_argument_and_closure(mode):
    on = mesh(1)
    w = spread(torch.ones(2), on)
    f = dtorch.capture(lambda x: x * 10 + w)
    for _ in range(3):
        assert full(f(w)).tolist() == [11.0] * 2
    for _ in range(3):
        assert full(f(spread(torch.full((2,), 2.0), on))).tolist() == [21.0] * 2
        assert full(f(w)).tolist() == [11.0] * 2
    assert f.replays == 5 - 1 + 1


def test_a_plain_tensor_that_is_written(mode):
    on = mesh(1)
    table = torch.ones(2)
    f = dtorch.capture(lambda x: x + table.to(x.device))
    for i in range(9):
        assert torch.equal(full(f(spread(torch.ones(2), on))), 1 + table)
        if i == 3:
            table.add_(1)
        if i == 6:
            table = torch.zeros(2)
    assert f.replays >= 3


def test_a_mask_that_is_looked_at(mode):
    on = mesh(1)

    @dtorch.capture
    def f(x, mask):
        return x + 1 if mask.all() else x * mask

    values = [torch.tensor([True, True]), torch.tensor([True, False])]
    for i in range(12):
        mask = values[(i // 4) % 2]
        want = [2.0, 2.0] if mask.all() else [1.0, 0.0]
        assert full(f(spread(torch.ones(2), on), spread(mask, on))).tolist() == want
    assert f.replays == 2 + 2 + 4


def test_a_step_counter_on_the_mesh(mode):
    on = mesh(1)
    step = spread(torch.tensor(0), on)

    @dtorch.capture
    def f(x):
        step.add_(1)
        return x * step

    for i in range(1, 8):
        assert full(f(spread(torch.ones(2), on))).tolist() == [float(i)] * 2
        assert int(step) == i
    assert f.replays == 5
