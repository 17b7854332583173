"""Unmodified modules and optimizers on the device: moved, tied, saved, trained."""

from __future__ import annotations

import pytest
import torch

import dtorch
from tests.engine.helpers import S0, R, both_modes, close, full, mesh, same, spread


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@both_modes
def test_there_and_back(mode):
    plain, moved = net(), net()
    x = torch.randn(6, 4)
    weight = moved[0].weight
    with mesh(2) as on:
        moved.to("dtorch")
    assert moved[0].weight is weight  # the same object: optimizers and ties keep it
    assert isinstance(weight, torch.nn.Parameter)
    assert isinstance(weight, dtorch.DTensor)
    assert weight.device_mesh == on
    assert weight.placements == (R,)
    assert all(isinstance(v, dtorch.DTensor) for v in moved.state_dict().values())
    close(moved(spread(x, on, S0)), plain(x))
    moved.cpu()
    assert type(moved[0].weight.data) is torch.Tensor
    assert moved[0].weight is weight
    for (name, a), b in zip(moved.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    moved.to(dtorch.zeros(1, device_mesh=on).device, torch.float64)
    assert moved[1].running_mean.dtype == torch.float64
    assert moved[1].num_batches_tracked.dtype == torch.int64


def test_made_on_the_device_with_torchs_bits():
    plain = net()
    with mesh(3), torch.device("dtorch"):
        there = net()
    for a, b in zip(there.parameters(), plain.parameters(), strict=True):
        same(a, b.detach(), [R])
    empty = torch.nn.Linear(4, 8, device="meta").to_empty(device=there[0].weight.device)
    empty.load_state_dict(there[0].state_dict())
    same(empty.weight, full(there[0].weight))


def test_tied_weights_and_buffers():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model.register_buffer("table", torch.arange(3))
    model["a"].register_buffer("table", model.table)
    with mesh(2):
        model.to("dtorch")
    assert model["a"].weight is model["b"].weight
    assert model.table.device.type == "dtorch"
    assert len(list(model.parameters())) == 3


@both_modes
def test_state_dicts_in_every_direction(mode):
    with mesh(2):
        for source in (net(), net().to("dtorch")):
            for target in (net(), net().to("dtorch")):
                with torch.no_grad():
                    source[0].weight.add_(1)
                assert target.load_state_dict(source.state_dict()) == torch.nn.modules.module._IncompatibleKeys([], [])
                torch.testing.assert_close(full(target[0].weight.detach()), full(source[0].weight.detach()))
        cut = spread(torch.zeros(8, 4), mesh(2), S0)
        target = torch.nn.Linear(4, 8, bias=False)
        target.weight = torch.nn.Parameter(cut)
        target.load_state_dict({"weight": torch.ones(8, 4)})
        same(target.weight, torch.ones(8, 4), [S0])  # values come, placement stays
        target.load_state_dict({"weight": torch.full((8, 4), 2.0)}, assign=True)
        assert type(target.weight.data) is torch.Tensor


@both_modes
def test_layers_agree_with_torch(mode):
    torch.manual_seed(1)
    x, ids, image = torch.randn(2, 6, 8), torch.randint(0, 9, (2, 6)), torch.randn(2, 4, 6, 6)
    layers = [
        (torch.nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True), x), (torch.nn.GRU(8, 5, batch_first=True), x),
        (torch.nn.Embedding(9, 4), ids), (torch.nn.Conv2d(4, 6, 3, padding=1), image), (torch.nn.GroupNorm(2, 4), image),
        (torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), x), (torch.nn.RNN(8, 3, batch_first=True), x),
        (torch.nn.ConvTranspose2d(4, 3, 2), image), (torch.nn.MaxPool2d(2), image), (torch.nn.AdaptiveAvgPool2d(2), image),
        (torch.nn.Upsample(scale_factor=2), image), (torch.nn.RMSNorm(8), x), (torch.nn.EmbeddingBag(9, 4), ids),
        (torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 3)), x), (torch.nn.PReLU(), x), (torch.nn.Bilinear(8, 8, 3), None),
    ]  # fmt: skip
    with mesh(2) as on:
        for layer, value in layers:
            with torch.no_grad():  # a live graph of the plain parameters would keep them where they are
                want = layer(x, x) if value is None else layer(value)
            layer.to("dtorch")
            there = spread(x if value is None else value, on, S0)
            got = layer(there, there) if value is None else layer(there)
            for g, w in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
                torch.testing.assert_close(full(g.detach()), w.detach(), rtol=1e-4, atol=1e-5)


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.Adam(p, amsgrad=True), lambda p: torch.optim.AdamW(p, foreach=False),
    lambda p: torch.optim.AdamW(p, foreach=True), lambda p: torch.optim.AdamW(p, fused=True), lambda p: torch.optim.RAdam(p, foreach=True),
    lambda p: torch.optim.RMSprop(p, foreach=True), lambda p: torch.optim.NAdam(p, foreach=True), lambda p: torch.optim.Adafactor(p),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_optimizers_give_torchs_bits(number):
    results = []
    for device in ("cpu", "dtorch"):
        with mesh(1):
            model = net()
            optimizer = OPTIMIZERS[number](model.parameters())  # made before the move
            model.to(device)
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).to(device)
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            results.append([full(p.detach()) for p in model.parameters()])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


@both_modes
def test_a_training_loop_plans_once(mode):
    from dtorch.client import graph

    with mesh(2) as on:
        model = net().to("dtorch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x = spread(torch.randn(6, 4), on, S0)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()

    for _ in range(3):
        step()
    before = len(graph.current_session().plans)
    for _ in range(5):
        step()
    assert len(graph.current_session().plans) == before


@both_modes
def test_autocast_and_scaler(mode):
    results = []
    for device in ("cpu", "dtorch"):
        with mesh(1):
            model = net().to(device)
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).to(device)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler(device, enabled=True)
            for _ in range(2):
                with torch.autocast(device, torch.bfloat16):
                    out = model(x)
                    assert out.dtype == torch.bfloat16
                    loss = torch.nn.functional.mse_loss(out, torch.zeros_like(out))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            results.append([full(p.detach()) for p in model.parameters()])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


def test_data_of_a_parameter():
    p = torch.nn.Parameter(spread(torch.ones(4), mesh(2), S0))
    p.data = p.data.half()
    assert p.dtype == torch.float16
    same(p + 1, torch.full((4,), 2, dtype=torch.float16))
    p.data.zero_()
    same(p, torch.zeros(4, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="copy_"):
        p.data = torch.ones(4)
    again = type(p)(p.data, requires_grad=False)
    assert isinstance(again, torch.nn.Parameter)
    assert not again.requires_grad
    same(again, full(p))
    with pytest.raises(RuntimeError, match="device"):
        p.grad = torch.ones(4, dtype=torch.float16)


def test_devices_of_torch():
    assert torch.accelerator.current_accelerator().type == "dtorch"
    torch.accelerator.synchronize()
    assert torch.get_device_module("dtorch") is torch.dtorch
    assert torch.dtorch.is_available()
    assert torch.dtorch.device_count() >= 1
    other = spread(torch.ones(2), mesh(3))
    with torch.dtorch.device(other.device):
        assert torch.ones(2).to("dtorch").device_mesh == other.device_mesh
        assert torch.dtorch.current_device() == other.device.index
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True)
    assert [b.tolist() for b in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_explain(capsys):
    on = mesh(2)
    a, b = spread(torch.randn(6, 4), on, S0), spread(torch.randn(6, 4), on, dtorch.Shard(1))
    report = dtorch.explain(lambda x, y: (x + y).t() @ x, a, b)
    text = capsys.readouterr().out
    for part in ("aten.add.Tensor", "Shard(dim=0)", "Shard(dim=1)", "bytes", f"{__file__}:"):
        assert part in text
    assert report.bytes > 0
    close(report.result, (full(a) + full(b)).t() @ full(a))
    quiet = dtorch.explain(lambda x: x * 2 + 1, a, quiet=True)
    assert quiet.bytes == 0
    assert len(quiet.lines) == 2
    assert capsys.readouterr().out == ""
