"""What the tables of memory say, and what a limit refuses."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

import dtorch
from tests.engine.helpers import S0, both_modes, mesh, spread


def line_of(offset: int = 0) -> str:
    return f"{__file__}:{sys._getframe(1).f_lineno + offset}"


def test_names_modules_lines_and_devices() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
    on = mesh(2)
    with on:
        model.to("dtorch")
    optimizer = torch.optim.Adam(model.parameters())
    x, made = dtorch.distribute_tensor(torch.randn(4, 8), on, [S0]), line_of()
    loss = model(x).sum()
    loss.backward()
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros_like(model[0].weight)  # step() takes seconds to import
    view = x[:2]
    found = dtorch.memory_summary()
    rows = {t.name: t for t in found.tensors if t.name}
    assert rows["Sequential.0.weight"].bytes == {0: 512, 1: 512}
    assert rows["Sequential.0.weight"].module == "Sequential.0"
    assert rows["Sequential.0.weight.grad"].total == 1024
    assert rows["Adam exp_avg of Sequential.0.weight"].shape == (16, 8)
    (mine,) = [t for t in found.tensors if t.shape == (4, 8) and not t.name]  # the view is in its memory
    assert mine.bytes == {0: 64, 1: 64}
    assert mine.line == made
    assert mine.placements == "[Shard(dim=0)]"
    assert found.by_line[made] == {0: 64, 1: 64}
    assert found.by_module["Sequential.0"][0] == 3 * 512 + 2 * 64
    assert list(found.by_module.values()) == sorted(found.by_module.values(), key=lambda held: -sum(held.values()))
    stats = dtorch.memory_stats()
    assert sum(found.devices[d] for s in stats for d in s.devices) == sum(s.live_bytes for s in stats)
    assert set(dtorch.memory_summary(1).devices) == {1}
    only = dtorch.memory_summary(module=model[0])
    assert "Linear.weight" in {t.name for t in only.tensors}
    text = str(found)
    assert "Adam exp_avg of Sequential.0.weight" in text
    assert made in text
    with pytest.raises(dtorch.DtorchError, match="No worker hosts device 99"):
        dtorch.memory_summary(99)
    assert view.shape == (2, 8)


@both_modes
def test_spare_memory_is_given_back() -> None:
    big = spread(torch.ones(1 << 19), mesh(2))  # 2 MiB, which is kept for the next upload of the size
    dtorch.synchronize()
    del big
    before = dtorch.memory_stats()
    assert dtorch.empty_cache() >= 1 << 21
    assert dtorch.empty_cache() == 0
    assert dtorch.memory_stats() == before


@pytest.fixture
def limited() -> Iterator[dtorch.Graph]:
    session = dtorch.Graph(mode="inline", memory_limit=10_000)
    with session:
        yield session
    session.close()


def test_what_does_not_fit_fails_alone(limited: dtorch.Graph) -> None:
    on = dtorch.DeviceMesh("cpu", [0, 1])
    x = spread(torch.ones(1500), on)  # 6000 bytes
    with pytest.raises(torch.OutOfMemoryError) as failure:
        (x + 1).sum().item()
    text = str(failure.value)
    assert "aten.add.Tensor failed on device cpu:0" in text
    assert line_of(-3) in text
    assert "6,000 bytes more do not fit on device 0, which holds 6,000 of at most 10,000 bytes (memory_limit)" in text
    assert (x[:500] + 1).sum().item() == 1000
    assert x.add_(1).sum().item() == 3000  # what is written in place needs no room
    cut = spread(torch.ones(1500), on, S0)  # 3000 bytes on each device
    with pytest.raises(torch.OutOfMemoryError):
        (cut + x).sum().item()
    del x
    assert (cut + 1).sum().item() == 3000


def test_views_aliases_and_what_was_freed_need_no_room(limited: dtorch.Graph) -> None:
    x = spread(torch.ones(1500), dtorch.DeviceMesh("cpu", [0, 1]))
    for _ in range(5):
        assert x.view(15, 100).T[3:].detach().shape == (97, 15)
        y = x[:900] + 1
        assert y.sum().item() == 1800
        del y


def test_each_device_has_its_own_limit(limited: dtorch.Graph) -> None:
    first, second = dtorch.DeviceMesh("cpu", [0]), dtorch.DeviceMesh("cpu", [1])
    dtorch.DeviceMesh("cpu", [0, 1])
    x, y = spread(torch.ones(1500), first), spread(torch.ones(2000), second)
    assert (x[:500] + 1).sum().item() == 1000
    with pytest.raises(torch.OutOfMemoryError, match="fit on device 1, which holds 8,000"):
        (y[:1000] + 1).sum().item()


def test_uploads_are_limited(limited: dtorch.Graph) -> None:
    x = spread(torch.arange(3000.0), dtorch.DeviceMesh("cpu", [0]))
    with pytest.raises(dtorch.RemoteError, match="12,000 bytes more do not fit"):
        x.to_torch()
    assert spread(torch.ones(4), dtorch.DeviceMesh("cpu", [0])).sum().item() == 4


def test_captured_calls_are_limited(limited: dtorch.Graph) -> None:
    on = dtorch.DeviceMesh("cpu", [0, 1])

    def work(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x) + 1
        return (y * 2)[:10]

    captured = dtorch.capture(work)
    x = spread(torch.ones(500), on)  # 2000 bytes, and 4000 to 6000 more while it runs
    with torch.no_grad():
        want = [captured(x).to_torch() for _ in range(4)][-1]
        assert captured.replays >= 1
        assert torch.equal(want, torch.full((10,), 4.0))
        filler = spread(torch.ones(1500), on)
        with pytest.raises(torch.OutOfMemoryError, match=f"issued at {__file__}"):
            captured(x).to_torch()
        del filler
        assert torch.equal(captured(x).to_torch(), want)


def test_limit_must_be_positive() -> None:
    with pytest.raises(dtorch.DtorchError, match="memory_limit=0 must be a positive number"):
        dtorch.Graph(mode="inline", memory_limit=0)
