"""Sessions: side by side, from threads, restarted, forked; and the ways to choose meshes and modes."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import dtorch
from dtorch.client import graph
from dtorch.core.errors import SessionClosedError
from tests.engine.helpers import (
    OPTIONS,
    S0,
    S1,
    P,
    R,
    both_modes,
    close,
    full,
    local_mode,
    mesh,
    run_program,
    same,
    spread,
)


def own_mesh(*devices: int) -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", list(devices))


# -- graphs side by side -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kinds", [("inline", "inline"), ("inline", "local"), ("local", "local")], ids="-".join)
def test_graphs_side_by_side(mode, kinds):
    a, b = (dtorch.Graph(**OPTIONS[kind]) for kind in kinds)
    x = torch.randn(6, 4)
    with a:
        in_a = spread(x, own_mesh(0, 1), S0)
    with b:
        in_b = spread(x, own_mesh(0, 1), S1)
    here = spread(x, mesh(2), S0)
    for _ in range(20):  # interleaved
        in_a, in_b, here = in_a * 1.5, in_b - 1, here + 2
        x_a, x_b = in_a.sum(), in_b.sum()
    want_a, want_b, want = x.clone(), x.clone(), x.clone()
    for _ in range(20):
        want_a, want_b, want = want_a * 1.5, want_b - 1, want + 2
    same(in_a, want_a, [S0])
    same(in_b, want_b, [S1])
    same(here, want, [S0])
    close(x_a, want_a.sum())
    close(x_b, want_b.sum())
    for mix in (lambda: in_a + in_b, lambda: here.add_(in_a), lambda: torch.stack([in_b, here])):
        with pytest.raises(RuntimeError, match="two sessions"):
            mix()
    same(here.copy_(in_a), want_a)
    a.close()
    with pytest.raises(SessionClosedError):
        in_a.to_torch()
    same(in_b + 1, want_b + 1)
    b.close()
    same(here, want_a)


@both_modes
def test_device_mesh_guard(mode):
    default, other = dtorch.Graph.default_graph(), dtorch.Graph(mode="inline")
    first, second = mesh(2), own_mesh(4, 5)
    with default.device_mesh_guard(first) as guarded:
        assert guarded is first
        x = dtorch.ones(4, placements=[S0])
        assert x.device_mesh == first
        assert torch.zeros(1, device="dtorch").device_mesh == first
        with other.device_mesh_guard(second):
            y = dtorch.ones(4)
            assert y.device_mesh is second
        assert dtorch.zeros(2).device_mesh == first
    assert y._h.session is other.session
    assert x._h.session is default.session
    same(y + 1, torch.full((4,), 2.0))
    with pytest.raises(ZeroDivisionError), default.device_mesh_guard(first):
        1 / 0
    other.close()
    default.synchronize()


def test_a_mesh_belongs_to_one_graph(mode):
    own = dtorch.Graph(mode="inline")
    m = own_mesh(0, 1)
    with own:
        dtorch.zeros(2, device_mesh=m)
    x = dtorch.ones(2, device_mesh=m)  # also outside of the block
    assert x._h.session is own.session
    assert m.unbind(0)[0]._graph is own.session
    same(x.redistribute(placements=[S0]), torch.ones(2), [S0])
    own.close()
    assert dtorch.ones(2, device_mesh=m)._h.session is not own.session  # its graph is gone: the default one takes it


def test_default_graph_and_workers(mode):
    assert dtorch.Graph.default_graph().session is graph.default_session()
    dtorch.zeros(2, device_mesh=mesh(2))
    (worker,) = dtorch.workers()
    assert worker.pid == os.getpid()
    assert set(worker.devices) >= {0, 1}
    assert worker.host
    assert worker.state


@local_mode
def test_workers_of_processes(mode):
    dtorch.zeros(2, device_mesh=mesh(3)).sum().item()
    found = dtorch.workers()
    assert len(found) == 2
    assert len({w.pid for w in found}) == 2
    assert os.getpid() not in {w.pid for w in found}
    assert {d for w in found for d in w.devices} >= {0, 1}
    for w in found:
        os.kill(w.pid, 0)


def test_virtual_devices(mode, monkeypatch):
    monkeypatch.setenv("DTORCH_DTENSOR_IN_SAME_DEVICE", "1")
    own = dtorch.Graph(mode="local")
    with own:
        x = spread(torch.randn(9, 3), own_mesh(*range(8)), S0)
        close(x @ x.t(), full(x) @ full(x).t())
        assert len(dtorch.workers()) == 1
        with pytest.raises(RuntimeError, match="devices 0 to 7"):
            dtorch.zeros(1, device_mesh=own_mesh(8))
    own.close()
    monkeypatch.setenv("DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE", "2")
    own = dtorch.Graph(mode="local")
    with own, pytest.raises(RuntimeError, match="devices 0 to 1"):
        dtorch.zeros(1, device_mesh=own_mesh(2))
    own.close()


@local_mode
def test_more_devices_than_workers(mode):
    x = torch.randn(13, 5)
    for size in (3, 5, 8, 16):
        d = spread(x, mesh(size), S0)
        close(d.t() @ d, x.t() @ x)
        same(d.redistribute(placements=[S1]), x, [S1])
        same(d.cumsum(0), x.cumsum(0))


# -- starting and ending -------------------------------------------------------------------------------------------
def test_shutdown_and_restart(mode):
    for _ in range(3):
        dtorch.shutdown()
        dtorch.init(mode="inline")
        m = own_mesh(0, 1)
        x = spread(torch.ones(4, 2), m, S0)
        same(x * 2, torch.full((4, 2), 2.0), [S0])
    dtorch.shutdown()
    dtorch.shutdown()
    with pytest.raises(SessionClosedError):
        x.to_torch()
    dtorch.init(mode="inline")
    same(spread(torch.ones(4), m, S0), torch.ones(4))  # an old mesh serves again
    dtorch.init(mode="inline")  # the same again: nothing happens


@local_mode
def test_restart_of_processes(mode):
    dtorch.zeros(2, device_mesh=mesh(2)).sum().item()
    before = {w.pid for w in dtorch.workers()}
    dtorch.shutdown()
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    dtorch.init(**OPTIONS["local"])
    x = spread(torch.arange(4.0), mesh(2), S0)
    assert x.sum().item() == 6
    assert not before & {w.pid for w in dtorch.workers()}


def test_mode_from_the_environment(tmp_path):
    done = run_program("import dtorch\ndtorch.ones(3)\n", tmp_path, mode="warp", check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("mode='warp': the execution mode must be one of inline, local, cluster.")


def test_the_device_is_there_before_dtorch_is_used(tmp_path):
    text = "import dtorch, torch\nm = torch.nn.Linear(2, 2).to('dtorch')\nprint(type(m.weight.data).__name__, m.weight.device.type)\n"
    assert run_program(text, tmp_path, mode="inline").stdout == "DTensor dtorch\n"


# -- threads -------------------------------------------------------------------------------------------------------
def work(x: torch.Tensor, rounds: int) -> torch.Tensor:
    """Operators of every kind: views, several results, writes, reductions over the cut dimension, reads."""
    for i in range(rounds):
        values, indices = x.sort(1)
        a, b = values.split([2, x.shape[1] - 2], 1)
        x = torch.cat([b, a], 1) * 1.01 + indices.float().mean()
        x[i % len(x)].mul_(0.5)
        x = x - x.sum(0) / len(x)
        q = x.t() @ x
        x = x + q.diagonal() / (1 + q.trace().abs())
        if i % 5 == 0:
            x = x + x.sum().item() * 1e-3
    return x


@both_modes
def test_threads_share_a_session(mode):
    inputs = [torch.randn(6, 4 + i % 3) for i in range(8)]
    on = mesh(2)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda x: full(work(spread(x, on, S0 if x.shape[1] % 2 else S1), 25)), inputs))
    for g, x in zip(got, inputs, strict=True):
        torch.testing.assert_close(g, work(x.clone(), 25), rtol=1e-3, atol=1e-3)


@both_modes
def test_threads_read_one_tensor(mode):
    x = torch.randn(12, 12)
    for _ in range(10):
        d = spread(x, mesh(2), S0)
        partial = d.t() @ d  # Partial: the first reader reduces it for all
        moved = d[3:9]  # a copied view: taken again by the first reader
        d.add_(1)
        jobs = [lambda: partial + 1, lambda: partial * 2, lambda: moved + 0, lambda: moved.sum(1), lambda: partial.t(), lambda: partial + partial]
        barrier = threading.Barrier(len(jobs))

        def run(job, barrier=barrier):
            barrier.wait()
            return full(job())

        with ThreadPoolExecutor(len(jobs)) as pool:
            got = list(pool.map(run, jobs))
        q, y = x.t() @ x, (x + 1)[3:9]
        for g, w in zip(got, [q + 1, q * 2, y, y.sum(1), q.t(), q + q], strict=True):
            torch.testing.assert_close(g, w)


@both_modes
def test_threads_fail_apart(mode):
    d = spread(torch.randn(6, 4), mesh(2), S0)
    want = full(d) * 2

    def run(i: int) -> str:
        try:
            if i % 2:
                return "fine" if torch.equal((d * 2).to_torch(), want) else "wrong"
            d[torch.tensor([50 + i])].to_torch()
        except IndexError as e:
            return "seen" if f"index {50 + i} " in str(e) else f"someone else's: {e}"
        return "missed"

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(run, range(60)))
    assert set(found[::2]) == {"seen"}, found
    assert set(found[1::2]) == {"fine"}, found


@both_modes
def test_backward_in_threads(mode):
    on = mesh(2)

    def run(i: int) -> torch.Tensor:
        w = spread(torch.full((4, 4), float(i)), on, S0).requires_grad_()
        (w * w).sum().backward()
        return full(w.grad)

    with ThreadPoolExecutor(4) as pool:
        for i, g in enumerate(pool.map(run, range(12))):
            assert torch.equal(g, torch.full((4, 4), 2.0 * i))


@both_modes
def test_asyncio_tasks_have_their_own_default_mesh(mode):
    a, b = mesh(2), mesh(3)

    async def make(m: dtorch.DeviceMesh) -> dtorch.DeviceMesh:
        with m:
            await asyncio.sleep(0.01)
            return dtorch.zeros(4).device_mesh

    async def main() -> list[dtorch.DeviceMesh]:
        return list(await asyncio.gather(make(a), make(b), make(a)))

    assert asyncio.run(main()) == [a, b, a]


# -- forks ---------------------------------------------------------------------------------------------------------
@both_modes
def test_a_fork_is_told_and_harms_nobody(mode):
    x = torch.arange(12.0).reshape(4, 3)
    d = spread(x, mesh(2), S0)
    same(d + 1, x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            (d + 1).to_torch()
        except SessionClosedError as e:
            code = 0 if "fork" in str(e) else 2
        except BaseException:
            code = 3
        try:
            dtorch.zeros(2)
        except SessionClosedError:
            pass
        else:
            code = 4
        dtorch.shutdown()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    same(d * 2, x * 2)


def test_data_loader_workers_are_forks_too(mode):
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [b[0] for b in torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)]
    d = spread(torch.zeros(4), mesh(2), S0)
    same(d + batches[1], torch.arange(4.0) + 4)
    same(next(iter(torch.utils.data.DataLoader(data, batch_size=4, pin_memory=False)))[0].to("dtorch"), torch.arange(4.0))


def test_partial_values_of_two_sessions_keep_apart(mode):
    own = dtorch.Graph(mode="inline")
    with own:
        a = dtorch.full((3,), 2.0, device_mesh=own_mesh(0, 1), placements=[P])
    b = dtorch.full((3,), 5.0, device_mesh=mesh(2), placements=[P])
    same(a + a, torch.full((3,), 4.0), [R] if a.placements == (R,) else None)
    same(b + b, torch.full((3,), 10.0))
    own.close()
