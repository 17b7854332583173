"""Workers are killed for real, and the program goes on and comes to the very same values."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch.client.weights import load_safetensors
from dtorch.core.errors import WorkerLostError
from tests.recovery.conftest import pair
from tests.transport.processes import is_alive, wait_until

R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)


def spread(value: torch.Tensor, on: dtorch.DeviceMesh, *placements: Any) -> Any:
    return dtorch.Tensor(value, device_mesh=on, placements=list(placements))


def loop(x: Any, during: Callable[[int], None] = lambda step: None) -> Any:
    for step in range(300):
        x = (x * 1.01 + x.sum() * 1e-4).cos_()
        during(step)
    return x


def train(
    on: dtorch.DeviceMesh, during: Callable[[int], None] = lambda step: None, zero: int = 0
) -> list[torch.Tensor]:
    """Values of parameters, buffers, optimizer states and losses after some steps with dropout."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4)
    )
    data = torch.randn(12, 8, 6, generator=torch.Generator().manual_seed(1))
    model = dtorch.parallelize(model, on, zero=zero) if zero else dtorch.parallelize(model, on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step, batch in enumerate(data):
        loss = model(batch.to("dtorch")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        during(step)
    states = [v for state in optimizer.state.values() for v in state.values()]
    found = [*model.parameters(), *model.buffers(), *states, *losses]
    return [v.detach().to_torch() if isinstance(v, dtorch.Tensor) else torch.as_tensor(v) for v in found]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_in_a_loop_of_small_operators(victims):
    x = torch.randn(8, 6)
    before = victims.pids
    got = loop(spread(x, pair(), S0), lambda step: victims.kill(1) if step == 150 else None)
    assert torch.equal(got.to_torch(), loop(x))
    after = dtorch.workers()
    assert not {w.pid for w in after} & set(before)
    assert [(w.index, w.state, is_alive(w.pid)) for w in after] == [(0, "ready", True), (1, "ready", True)]
    assert wait_until(lambda: not any(map(is_alive, before)), 2)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV], ids=lambda s: s.name)
def test_in_a_training_step(victims, signum):
    calm = train(pair())
    torch.manual_seed(0)
    same(train(pair(), lambda step: victims.kill(step % 2, signum=signum) if step == 7 else None), calm)


def test_with_parameters_in_pieces(victims):
    calm = train(pair(), zero=3)
    same(train(pair(), lambda step: victims.kill(0) if step == 5 else None, zero=3), calm)


def test_within_collectives(victims):
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    x, y = spread(a, pair(), S0), spread(b, pair(), S1)
    calm = [(x.redistribute(placements=[S1]) @ y.redistribute(placements=[R])).sum(0).to_torch() for _ in range(2)][1]
    found = []
    for step in range(120):
        found.append((x.redistribute(placements=[S1]) @ y.redistribute(placements=[R])).sum(0))
        if step == 60:
            victims.kill(0)
    assert all(torch.equal(f.to_torch(), calm) for f in found)


@pytest.mark.parametrize("size", [(4, 3), (512, 768)], ids=["in the stream", "in shared memory"])
def test_reads_that_are_pending(victims, size):
    value = torch.randn(size)
    x = spread(value, pair(), S0)
    early = x.to_torch_async()
    early.get()
    futures = []
    for step in range(20):
        futures.append((x * step).to_torch_async())
        if step == 10:
            victims.kill(1)
    assert all(torch.equal(future.get(), value * step) for step, future in enumerate(futures))
    assert torch.equal(early.get(), value)


def test_shapes_that_depend_on_values(victims):
    x = spread(torch.arange(20), pair(), S0)
    for step in range(20):
        if step == 10:
            victims.kill(0)
        assert (x > step).nonzero().shape == (19 - step, 1)


def test_uploads_through_shared_memory_that_was_used_again(victims):
    values = [torch.randn(1000, 600) for _ in range(40)]  # 96 MB; the memory holds 64
    tensors = [spread(v, pair(), S0) for v in values]
    sums = [t.sum().item() for t in tensors[::10]]
    victims.kill(1)
    assert [t.sum().item() for t in tensors[::10]] == sums
    assert all(torch.equal(t.to_torch(), v) for t, v in zip(tensors, values, strict=True))


def test_values_from_files(victims, tmp_path):
    from safetensors.torch import save_file

    value = {"a": torch.randn(700, 800), "b": torch.randn(5)}
    save_file(value, tmp_path / "w.safetensors")
    loaded = load_safetensors(tmp_path / "w.safetensors", pair(), {"a": [S0]})
    loaded["b"].add_(1)
    dtorch.synchronize()
    victims.kill(0)
    assert torch.equal(loaded["a"].to_torch(), value["a"])
    assert torch.equal(loaded["b"].to_torch(), value["b"] + 1)


def test_values_from_a_file_that_is_gone(victims, tmp_path):
    """The controller keeps it open as long as a replay may need it."""
    from safetensors.torch import save_file

    value = torch.randn(700, 800)
    save_file({"a": value}, tmp_path / "w.safetensors")
    loaded = load_safetensors(tmp_path / "w.safetensors", pair())["a"]
    dtorch.synchronize()
    (tmp_path / "w.safetensors").unlink()
    victims.kill(0)
    assert torch.equal(loaded.to_torch(), value)


def test_random_numbers_go_on(victims):
    def draw(kill: bool) -> torch.Tensor:
        torch.manual_seed(5)
        own = torch.Generator(device="dtorch").manual_seed(7)
        parts = []
        for step in range(20):
            parts.append(dtorch.randn(4, device_mesh=pair(), placements=[S0]))
            parts.append(torch.rand(4, generator=own, device="dtorch"))
            if kill and step == 10:
                victims.kill(1)
        return torch.stack([p.to_torch() for p in parts])

    assert torch.equal(draw(False), draw(True))


def test_a_failure_is_told_once(victims):
    x = spread(torch.ones(6, 4), pair(), S0)
    lost = x[torch.tensor([9])]
    with pytest.raises(IndexError, match="index 9"):
        dtorch.synchronize()
    victims.kill(0)
    dtorch.synchronize()
    assert x.sum().item() == 24
    with pytest.raises(IndexError, match="earlier failure"):
        lost.to_torch()


def test_all_at_once_and_again_and_again(victims):
    x = torch.randn(8, 6)
    for _ in range(4):  # more often than workers may be started without getting further
        got = loop(spread(x, pair(), S0), lambda step: victims.kill(0, 1) if step == 150 else None)
        assert torch.equal(got.to_torch(), loop(x))
        dtorch.synchronize()


def test_while_it_recovers(victims):
    x = torch.randn(8, 6)
    y = loop(spread(x, pair(), S0))
    before = set(victims.pids)
    victims.kill(1)
    os.kill(victims.started(before)[0], signal.SIGKILL)
    assert torch.equal(y.to_torch(), loop(x))


def test_the_template(victims):
    x = torch.randn(8, 6)
    got = loop(spread(x, pair(), S0), lambda step: os.kill(victims.template, signal.SIGKILL) if step == 150 else None)
    assert torch.equal(got.to_torch(), loop(x))


def test_a_template_that_is_stopped(victims):
    x = spread(torch.ones(3), pair(), R)
    os.kill(victims.template, signal.SIGSTOP)
    victims.kill(0)
    assert torch.equal((x + 1).to_torch(), torch.full((3,), 2.0))


def test_a_worker_that_goes_on_is_not_lost(victims):
    x = spread(torch.ones(3), pair(), R)
    before = victims.pids
    victims.kill(0, signum=signal.SIGSTOP)
    y = x + 1
    time.sleep(0.3)
    victims.kill(0, signum=signal.SIGCONT)
    assert torch.equal(y.to_torch(), torch.full((3,), 2.0))
    assert victims.pids == before


def test_devices_that_came_later(open_victims):
    victims = open_victims(workers=3)
    with victims.graph:
        torch.manual_seed(0)
        x = spread(torch.arange(6.0), dtorch.DeviceMesh("cpu", [0, 1]), S0)
        y = x.exp() + dtorch.randn(6, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]))
        victims.graph.synchronize()
        late = y.redistribute(dtorch.DeviceMesh("cpu", [1, 2]), [S0]) * 2
        late.add_(dtorch.randn(6, device_mesh=dtorch.DeviceMesh("cpu", [1, 2])))
        want = late.to_torch()
        for index in (0, 2):
            victims.kill(index)
            assert torch.equal(late.to_torch(), want)
            assert torch.equal((late + 1).to_torch(), want + 1)


def test_snapshots_keep_the_log_short(open_victims):
    victims = open_victims(log_operators=300)
    with victims.graph:
        calm = train(pair())
        folder = victims.directory / "snapshots"

        def during(step: int) -> None:
            time.sleep(0.15)  # the controller looks at its clock four times a second
            if step in (6, 9):
                dtorch.synchronize()
                victims.kill(step % 2)

        before = [dtorch.zeros(500, device_mesh=pair()).add_(k) for k in range(40)]
        for _ in range(600):
            before = [(t + 1).sub_(1) for t in before]
        same(train(pair(), during), calm)
        assert wait_until(lambda: len(list(folder.iterdir())) == 2, 5)
        assert all(torch.equal(t.to_torch(), torch.full((500,), float(k))) for k, t in enumerate(before))


def test_what_is_never_replaced(open_victims):
    victims = open_victims(restarts=0)
    with victims.graph:
        x = spread(torch.ones(3), pair(), R)
        pid = victims.pids[1]
        victims.kill(1)
        with pytest.raises(WorkerLostError, match=rf"Worker 1 \(pid {pid}, devices \[1\]\) was lost: .*SIGKILL"):
            while True:
                (x + 1).to_torch()


def test_what_always_dies_is_given_up(open_victims):
    victims = open_victims(restarts=2)
    with victims.graph:
        x = spread(torch.randn(1200, 1200), pair(), R)
        before = set(victims.pids)
        for _ in range(40):  # so that there is something to do all the time
            y = x @ x
        victims.kill(1)
        for _ in range(2):
            started = victims.started(before)
            before = set(started)
            os.kill(started[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="started again 2 times without getting further"):
            y.to_torch()
