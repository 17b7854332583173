"""ZeRO: what devices hold at each stage, what they send, and that the numbers are those of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtorch

DEVICES, WIDTH, LAYERS = 4, 256, 4
S0, R, P = dtorch.Shard(0), dtorch.Replicate(), dtorch.Partial()
X = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def placed(zero: int) -> nn.Module:
    return dtorch.parallelize(network(), dtorch.init_device_mesh("cpu", (DEVICES,), mesh_dim_names=["dp"]), zero=zero)


def step(model: nn.Module, x: Any, optimizer: torch.optim.Optimizer) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def share() -> float:
    """Bytes that a device holds, as a multiple of the parameters'. One worker hosts all devices here."""
    (stats,) = dtorch.memory_stats()
    return stats.live_bytes / DEVICES / sum(p.numel() * 4 for p in network().parameters())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bytes_are_those_of_the_formulas(zero: int) -> None:
    model, x = placed(zero), X.to("dtorch")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, x, optimizer)
    cut = 1 / DEVICES
    parameters, gradients, states = cut if zero > 2 else 1, cut if zero > 1 else 1, 2 * (cut if zero else 1)
    assert share() == pytest.approx(parameters + states, rel=0.05)
    loss = model(x).square().mean()
    # Activations are small here. At stage 3 autograd holds pieces of the gathered parameters, not these.
    assert share() < parameters + states + (0.3 if zero == 3 else 0.05)
    loss.backward()
    assert share() == pytest.approx(parameters + states + gradients, rel=0.05)


@pytest.mark.parametrize(
    ("zero", "sent"),
    [
        (0, {"all_reduce": 2 * LAYERS}),
        (1, {"reduce_scatter": 2 * LAYERS, "all_gather": 2 * LAYERS}),
        (2, {"reduce_scatter": 2 * LAYERS, "all_gather": 2 * LAYERS}),
        # Both parameters forward, the weights alone backward.
        (3, {"reduce_scatter": 2 * LAYERS, "all_gather": 3 * LAYERS}),
    ],
)
def test_a_step_sends_each_gradient_once(zero: int, sent: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    model, x = placed(zero), X.to("dtorch")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, x, optimizer)
    report = dtorch.explain(step, model, x, optimizer)
    capsys.readouterr()
    assert report.collectives == sent


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9),
    ],
    ids=["sgd", "adamw", "adagrad", "rmsprop"],
)
def test_optimizers(zero: int, make: Any) -> None:
    models = [network(), placed(zero)]
    for model, x in zip(models, (X, X.to("dtorch")), strict=True):
        optimizer = make(model.parameters())
        for _ in range(3):
            for part in (x[:1], x[1:]):  # accumulated
                (model(part).square().mean() / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine.to_torch(), theirs, rtol=1e-4, atol=1e-6)
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, dtorch.Tensor) and v.dim()]
    assert states
    assert all(list(v.placements) == [S0] for v in states)


def test_a_graph_that_is_kept() -> None:
    """The second backward finds the parameters gathered by the first."""
    plain, model = network(), placed(3)
    for m, x in ((plain, X), (model, X.to("dtorch"))):
        loss = m(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-7)


def test_states_are_copied_and_loaded_as_they_lie() -> None:
    model, x = placed(1), X.to("dtorch")
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, x, optimizer)
    saved = optimizer.state_dict()
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(saved)
    assert all(list(v.placements) == [S0] for s in again.state.values() for v in s.values() if v.dim())
