"""Errors: one clear sentence, the right type, the user's file and line, and the next operator works."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch.core.errors import (
    CommError,
    DtorchError,
    ImplicitRedistributionError,
    PlacementError,
    RemoteError,
    SessionClosedError,
    WorkerLostError,
)
from dtorch.worker.kernels import STAND_INS
from tests.engine.helpers import OPTIONS, S0, S1, R, both_modes, full, local_mode, mesh, run_program, same, spread

HERE = __file__
FAR = torch.tensor([1, 9])  # an index that no tensor here has


def line_of_caller() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def one_sentence(error: BaseException) -> str:
    """The text, which must be for people: no newline before the end, no traceback, no internals."""
    text = str(error)
    assert "\n" not in text.strip(), text
    assert "Traceback" not in text
    assert "0x7f" not in text
    assert len(text) < 700, text
    return text


# -- what a worker finds -------------------------------------------------------------------------------------------
@both_modes
def test_a_failure_says_what_where_and_whose(mode):
    d = spread(torch.randn(6, 4), mesh(2), S0)
    line = line_of_caller() + 1
    y = d[FAR]
    with pytest.raises(RemoteError) as caught:
        (y + 1).sum().item()
    error = caught.value
    text = one_sentence(error)
    assert isinstance(error, DtorchError)
    assert isinstance(error, IndexError)
    assert error.site == f"{HERE}:{line}"
    assert error.operator == "aten.index.Tensor"
    assert error.device in ("cpu:0", "cpu:1")
    assert error.remote_type == "IndexError"
    assert "index 9 is out of bounds for dimension 0 with size 6" in text
    for part in (error.site, error.operator, error.device, "(6, 4) float32 [Shard(dim=0)]", "(3, 4)"):
        assert part in text
    assert "Traceback (most recent call last)" in error.remote_traceback
    assert "IndexError" in error.remote_traceback
    same(d + 1, full(d) + 1, [S0])


@both_modes
def test_a_failure_is_raised_once(mode):
    d = spread(torch.ones(6, 4), mesh(2), S0)
    y = d[FAR]
    with pytest.raises(IndexError, match="index 9"):
        dtorch.synchronize()
    dtorch.synchronize()
    assert d.sum().item() == 24
    line = line_of_caller() + 1
    z = y * 2
    with pytest.raises(RemoteError, match="earlier failure.*index 9") as caught:  # what is lost stays lost
        z.to_torch()
    assert caught.value.site is not None
    assert f":{line}" not in caught.value.site  # the line of the first failure, not of this one
    dtorch.synchronize()


@both_modes
def test_two_failures_are_both_raised(mode):
    d = spread(torch.randn(6, 4), mesh(2), S0)
    a, b = d[FAR], d.t()[FAR]
    with pytest.raises(IndexError, match="size 4"):
        b.to_torch()
    with pytest.raises(IndexError, match="size 6"):
        a.to_torch()
    dtorch.synchronize()


@both_modes
def test_what_does_not_depend_on_it_is_fine(mode):
    d = spread(torch.randn(6, 4), mesh(2), S0)
    lost, kept = d[FAR], d * 3
    with pytest.raises(IndexError):
        kept.to_torch()  # the first moment to say it
    same(kept, full(d) * 3)
    del lost


@both_modes
def test_a_failed_write_leaves_the_tensor_usable(mode):
    for where in (S0, R, S1):
        x = torch.randn(6, 4)
        d = spread(x, mesh(2), where)
        d.index_add_(0, FAR, torch.ones(2, 4))
        with pytest.raises((IndexError, RuntimeError), match="index"):
            dtorch.synchronize()
        d.fill_(2)
        same(d, torch.full((6, 4), 2.0))


@both_modes
def test_a_failure_on_one_device_alone(mode):
    d = spread(torch.tensor([1.0, 1.0, -1.0, 1.0]).reshape(4, 1, 1), mesh(2), S0)  # the second half is not positive
    y = torch.linalg.cholesky(d)
    with pytest.raises(RemoteError, match="device cpu:1.*cholesky") as caught:
        y.sum().item()
    assert caught.value.device == "cpu:1"
    same(d * 2, full(d) * 2)


@both_modes
def test_what_is_lost_stays_lost_on_other_meshes(mode):
    x = torch.ones(4, 3)
    for source, target in ((mesh(1), mesh(1, first=1)), (mesh(1), mesh(2)), (mesh(2), mesh(1, first=3)), (mesh(2), mesh(2, 2))):
        lost = spread(x, source, R)[FAR].redistribute(target, [R] * target.ndim) * 2 + 5
        for _ in range(3):
            with pytest.raises(IndexError, match="index 9"):
                lost.to_torch()
        same(spread(x, source, R).redistribute(target, [R] * target.ndim) * 2, 2 * x)


@both_modes
def test_nothing_waits_for_what_is_lost(mode):
    d = spread(torch.ones(4, 3), mesh(2), S0)
    lost = d[FAR]
    reads = [
        lambda: lost.nonzero(), lambda: lost.unique(), lambda: lost[lost > 0], lambda: lost.sum().item(), lambda: bool(lost.any()),
        lambda: lost.to_local(1), lambda: print(lost), lambda: lost.to_torch_async().get(), lambda: lost.redistribute(mesh(3)).tolist(),
        lambda: torch.equal(lost, lost), lambda: lost.add_(1).numpy(),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(IndexError, match="index 9"):
            read()
    same(d * 2, torch.full((4, 3), 2.0))


@both_modes
def test_small_host_tensors_fail_once_as_well(mode):
    d = spread(torch.arange(4), mesh(2), R)
    with pytest.raises(IndexError, match="index 9"):
        d[FAR].to_torch()
    dtorch.synchronize()


@both_modes
def test_the_line_is_the_users_also_within_libraries(mode):
    d = spread(torch.randn(6, 4), mesh(2), S0)
    table = torch.nn.Embedding(5, 3).to(d.device)
    ids = spread(torch.randint(100, 200, (40000,)), mesh(2), S0)
    line = line_of_caller() + 1
    out = torch.nn.functional.relu(table(ids))
    with pytest.raises(IndexError, match="out of range") as caught:
        out.sum().item()
    assert caught.value.site == f"{HERE}:{line}"


@both_modes
def test_no_memory_on_a_worker(mode):
    d = spread(torch.ones(6, 4), mesh(2), S0)
    line = line_of_caller() + 1
    big = dtorch.empty(1 << 46, device_mesh=mesh(2), placements=[S0])
    with pytest.raises(RemoteError, match="memory") as caught:
        big.sum().item()
    assert caught.value.site == f"{HERE}:{line}"
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert "memory" in one_sentence(caught.value)
    assert "140737488355328 bytes" in str(caught.value)
    same(d + 1, torch.full((6, 4), 2.0))


def test_a_full_disk_on_a_worker(mode, monkeypatch):
    def full_disk(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setitem(STAND_INS, "aten::erfinv.default", full_disk)
    d = spread(torch.ones(7, 3), mesh(2), S0)
    d.erfinv()
    with pytest.raises(OSError, match="No space left on device") as caught:
        dtorch.synchronize()
    assert isinstance(caught.value, RemoteError)
    one_sentence(caught.value)
    d.add_(1)
    same(d, torch.full((7, 3), 2.0))


def test_a_full_disk_at_the_start(mode, monkeypatch):
    def full_disk(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")

    monkeypatch.setattr(tempfile, "mkdtemp", full_disk)
    with pytest.raises(CommError, match=r"cannot be started.*No space left on device"):
        dtorch.Graph(mode="local")


@pytest.mark.parametrize("mode", ["local"], indirect=True)
def test_a_lost_worker(mode):
    own = dtorch.Graph(**OPTIONS["local"], restarts=0)
    with own:
        d = spread(torch.ones(6, 4), dtorch.DeviceMesh("cpu", [0, 1]), S0)
        d.sum().item()
        victim = dtorch.workers()[1]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=rf"Worker 1 \(pid {victim.pid}, devices \[1\]\) was lost: .*SIGKILL") as caught:
        for _ in range(1000):
            d.sum().item()
    one_sentence(caught.value)
    with pytest.raises(WorkerLostError):
        d.to_torch()
    own.close()
    same(spread(torch.ones(3), mesh(2), S0), torch.ones(3))  # other sessions go on


@pytest.mark.parametrize("mode", ["local"], indirect=True)
def test_a_fault_of_the_engine_itself(mode):
    own = dtorch.Graph(**OPTIONS["local"])
    with own:
        d = spread(torch.ones(6, 4), dtorch.DeviceMesh("cpu", [0, 1]), S0)
        pids = {w.pid for w in dtorch.workers()}
        own.session.buf.extend((9999, 1))  # a plan that nobody has sent
        with pytest.raises(WorkerLostError, match=r"Worker [01] \(pid \d+, devices \[[01]\]\) was lost: KeyError: ") as caught:
            d.sum().item()
    assert int(str(caught.value).split("pid ")[1].split(",")[0]) in pids
    one_sentence(caught.value)
    assert "Traceback" in caught.value.__notes__[0]
    own.close()


# -- what the client finds -----------------------------------------------------------------------------------------
@both_modes
def test_wrong_arguments_are_refused_at_once_as_by_torch(mode):
    x = torch.randn(6, 4)
    d = spread(x, mesh(2), S0)
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t @ t, lambda t: t + torch.ones(5), lambda t: t.view(7), lambda t: t.sum(3), lambda t: t[7], lambda t: t.reshape(-1, 5),
        lambda t: torch.cat([t, t[:, :2]]), lambda t: t.transpose(0, 2), lambda t: t.add_(torch.ones(2, 6, 4)), lambda t: t.expand(3, 3),
        lambda t: torch.nn.functional.linear(t, t.t()), lambda t: t.softmax(5), lambda t: t.int().exp_(), lambda t: t.split([1, 1]),
        lambda t: torch.stack([t, t[0]]), lambda t: t.index_select(0, torch.tensor([0.5])), lambda t: t.squeeze(4), lambda t: t.chunk(0),
        lambda t: t.bool() - t.bool(), lambda t: torch.bmm(t, t), lambda t: t.gather(0, torch.zeros(1).long()), lambda t: t.unfold(0, 9, 1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(Exception) as wanted:  # noqa: PT011  (torch's own says which)
            call(x.clone())
        with pytest.raises(wanted.type) as caught:
            full(call(d))
        last = traceback.extract_tb(caught.value.__traceback__)
        assert any(frame.filename == HERE for frame in last)
        dtorch.synchronize()
    same(d, x, [S0])


def test_placements_that_do_not_fit():
    on, wide = mesh(2), mesh(2, 2, names=("dp", "tp"))
    x = torch.randn(4, 3)
    cases: list[tuple[Any, Any, str]] = [
        (on, [dtorch.Shard(2)], r"Shard\(2\) on mesh axis 0: the tensor has 2 dimensions, so the dimension must lie in \[-2, 1\]"),
        (on, [dtorch.Shard(-3)], r"Shard\(-3\)"),
        (on, [S0, S0], r"2 placements .* for a mesh of 1 axes: give one placement per mesh axis"),
        (wide, [S0], r"1 placements .* for a mesh of 2 axes"),
        (on, ["shard"], r"'shard' is not a placement. Use dtorch.Shard\(dim\)"),
        (on, S0, r"must be a list with one placement per mesh axis"),
        (on, 3, r"must be a list"),
        (on, [], r"0 placements"),
    ]
    for m, where, pattern in cases:
        for make in (
            lambda m, w: dtorch.Tensor(x, device_mesh=m, placements=w),
            lambda m, w: dtorch.zeros(4, 3, device_mesh=m, placements=w),
            lambda m, w: spread(x, m).redistribute(m, w),
            lambda m, w: dtorch.zeros_like(x, device_mesh=m, placements=w),
            lambda m, w: dtorch.tensor(x.tolist(), device_mesh=m, placements=w),
        ):
            with pytest.raises(PlacementError, match=pattern) as caught:
                make(m, where)
            one_sentence(caught.value)
            assert isinstance(caught.value, ValueError)
    with pytest.raises(PlacementError, match="reduction must be one of sum, avg"):
        dtorch.Partial("median")
    with pytest.raises(DtorchError, match="give one of the two"):
        dtorch.Graph(mode="local", workers=2, null_workers=2)
    for wrong in ("x", 0.0):
        with pytest.raises(PlacementError, match="are whole numbers"):
            dtorch.Shard(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="mesh_shape=2"):
        dtorch.init_device_mesh("cpu", 2)  # type: ignore[arg-type]
    with pytest.raises(PlacementError, match="use Replicate"):
        dtorch.zeros((), device_mesh=on, placements=[S0])
    with pytest.raises(PlacementError, match="is not a dtorch.DeviceMesh"):
        dtorch.zeros(3, device_mesh="cpu")


def test_all_faults_are_named_at_once():
    wide = mesh(2, 2, names=("dp", "tp"))
    with pytest.raises(PlacementError, match=r"(?=.*Shard\(7\) on mesh axis 0)(?=.*'nonsense' is not a placement)"):
        dtorch.zeros(4, 3, device_mesh=wide, placements=[dtorch.Shard(7), "nonsense"])
    with pytest.raises(PlacementError, match=r"(?=.*3 placements)(?=.*Shard\(5\))"):
        dtorch.Tensor(torch.ones(2), device_mesh=wide, placements=[R, R, dtorch.Shard(5)])
    with pytest.raises(PlacementError, match=r"(?=.*device= or device_mesh=)(?=.*placements)"):
        dtorch.zeros(2, device="cpu", device_mesh=wide, placements=[R, R])
    with pytest.raises(PlacementError, match=r"(?=.*'pp')(?=.*'maybe')"):
        spread(torch.ones(2), wide).redistribute_by_dict({"pp": R}, default_placement_mode="maybe")
    with pytest.raises(PlacementError, match=r"(?=.*occur once)(?=.*one distinct name per axis)"):
        dtorch.DeviceMesh("cpu", [0, 0], mesh_dim_names=("a", "b"))
    with pytest.raises(DtorchError, match=r"(?=.*mode='warp')(?=.*workers=0)(?=.*threads=-1)"):
        dtorch.Graph(mode="warp", workers=0, threads=-1)


def test_meshes_that_cannot_be():
    for make, pattern in (
        (lambda: dtorch.DeviceMesh("cpu", [0, 0]), "every device number must be >= 0 and occur once"),
        (lambda: dtorch.DeviceMesh("cpu", [-1]), "every device number must be >= 0"),
        (lambda: dtorch.DeviceMesh("banana", [0]), "torch knows no devices called 'banana'"),
        (lambda: dtorch.DeviceMesh("cpu", []), "every device number"),
        (lambda: dtorch.DeviceMesh("cpu", [[0, 1], [2]]), "nested list"),
        (lambda: dtorch.DeviceMesh("cpu", ["a"]), "nested list"),
        (lambda: dtorch.DeviceMesh("cpu", [0.5]), "integers"),
        (lambda: dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")), "one distinct name per axis"),
        (lambda: dtorch.init_device_mesh("cpu", (2, 0)), "at least 1"),
        (lambda: dtorch.init_device_mesh("cpu", ()), "at least 1"),
        (lambda: mesh(2, names=("dp",))["tp"], r"no axis 'tp': its axes are \['dp'\]"),
        (lambda: mesh(2).unbind("tp"), "no axis 'tp': its axes are unnamed"),
        (lambda: mesh(2).size(3), "no axis 3"),
    ):
        with pytest.raises(PlacementError, match=pattern) as caught:
            make()
        one_sentence(caught.value)


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_devices_that_do_not_exist(mode, kind):
    few = dtorch.Graph(**OPTIONS[kind], max_devices=2)
    with few:
        same(dtorch.zeros(4, device_mesh=dtorch.DeviceMesh("cpu", [0, 1]), placements=[S0]), torch.zeros(4))
        with pytest.raises(DtorchError, match=r"names device 2; this session has devices 0 to 1") as caught:
            dtorch.zeros(4, device_mesh=dtorch.DeviceMesh("cpu", [0, 1, 2]), placements=[S0])
        one_sentence(caught.value)
        with pytest.raises(DtorchError, match=r"wants devices of type 'cuda'; the workers of this session have 'cpu'") as caught:
            dtorch.zeros(4, device_mesh=dtorch.DeviceMesh("cuda", [0, 1]))
        one_sentence(caught.value)
        with pytest.raises(RuntimeError, match=r"no device dtorch:9"):
            torch.zeros(1, device="dtorch:9")
        same(dtorch.ones(2), torch.ones(2))
    few.close()


def test_a_device_type_that_the_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run_program("import dtorch\ndtorch.init(device_type='cuda')\nprint(dtorch.zeros(2).sum())\n", tmp_path, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "cuda" in last.lower()
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_too_many_meshes(mode):
    own = dtorch.Graph(mode="inline")
    with own:
        kept = [dtorch.zeros(1, device_mesh=dtorch.DeviceMesh("cpu", [i])) for i in range(64)]
        with pytest.raises(DtorchError, match="64 different meshes"):
            dtorch.zeros(1, device_mesh=dtorch.DeviceMesh("cpu", [64]))
        same(kept[63] + 1, torch.ones(1))
    own.close()


def test_options_that_cannot_be(mode, monkeypatch):
    for options, pattern in (
        ({"mode": "warp"}, "mode='warp': the execution mode must be one of inline, local"),
        ({"mode": "local", "workers": 0}, "workers=0 must be a positive number"),
        ({"mode": "local", "max_devices": "two"}, "max_devices='two'"),
        ({"mode": "local", "device_type": "tpu"}, "device_type='tpu'"),
    ):
        with pytest.raises(DtorchError, match=pattern) as caught:
            dtorch.Graph(**options)
        one_sentence(caught.value)
    monkeypatch.setenv("DTORCH_WORKERS", "many")
    with pytest.raises(DtorchError, match="DTORCH_WORKERS='many' must be a whole number"):
        dtorch.Graph(mode="local")
    monkeypatch.setenv("DTORCH_WORKERS", "1")
    with pytest.raises(DtorchError, match="already runs in mode 'inline' with other options"):
        dtorch.init(mode="local")
    with pytest.raises(TypeError):
        dtorch.init(moed="local")


@pytest.mark.parametrize("kind", ["inline", "local"])
def test_tensors_of_a_closed_session(mode, kind):
    own = dtorch.Graph(**OPTIONS[kind])
    with own:
        d = spread(torch.ones(6, 4), dtorch.DeviceMesh("cpu", [0, 1]), S0)
        d.sum().item()
    own.close()
    for use in (lambda: d.to_torch(), lambda: d + 1, lambda: d.add_(1), lambda: print(d), lambda: d.redistribute(placements=[R])):
        with pytest.raises(SessionClosedError, match="shut down"):
            full(use())
    here = spread(torch.ones(6, 4), mesh(2), S0)
    for mix in (lambda: d + here, lambda: here + d, lambda: torch.cat([here, d])):
        with pytest.raises(RuntimeError, match="shut down|two sessions"):
            mix()
    same(here + 1, torch.full((6, 4), 2.0))


# -- strict mode ---------------------------------------------------------------------------------------------------
@both_modes
def test_strict_mode_names_operator_placements_and_the_legal_ones(mode):
    a, b = spread(torch.randn(6, 4), mesh(2), S0), spread(torch.randn(6, 4), mesh(2), S1)
    with dtorch.strict():
        with pytest.raises(ImplicitRedistributionError) as caught:
            a + b
        text = one_sentence(caught.value)
        for part in ("aten.add.Tensor", "Shard(dim=0)", "Shard(dim=1)", "redistribute"):
            assert part in text
    assert isinstance(caught.value, PlacementError)
    same(a + b, full(a) + full(b))


# -- operators -----------------------------------------------------------------------------------------------------
@local_mode
def test_an_operator_that_only_the_client_has(mode):
    d = spread(torch.ones(6, 4), mesh(2), S0)
    d.sum().item()  # the workers are there before it
    library = torch.library.Library("torch_nn", "FRAGMENT")
    library.define("only_here(Tensor x) -> Tensor")
    library.impl("only_here", torch.clone, "CompositeExplicitAutograd")
    before = dtorch.workers()
    for _ in range(2):
        with pytest.raises(dtorch.RemoteError, match=r"torch 2\.13.* has no operator 'torch_nn::only_here\.default'"):
            torch.ops.torch_nn.only_here(d).to_torch()
    same(d + 1, torch.full((6, 4), 2.0), [S0])
    assert dtorch.workers() == before


@both_modes
def test_operators_that_torch_defines_when_they_are_first_called(mode):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    x, w, target = torch.randn(6, 8), torch.randn(12, 8), torch.randint(12, (6,))
    options = LinearCrossEntropyOptions(chunking_method=None, batch_chunk_size=2)
    want = torch.nn.functional.linear_cross_entropy(x, w, target, options=options)
    got = torch.nn.functional.linear_cross_entropy(
        spread(x, mesh(2), S0), spread(w, mesh(2)), spread(target, mesh(2), S0), options=options
    )
    torch.testing.assert_close(full(got), want)


@both_modes
def test_what_could_draw_random_numbers_but_does_not(mode):
    x = torch.randn(5)
    same(torch.nn.functional.rrelu(spread(x, mesh(2), S0)), torch.nn.functional.rrelu(x), [S0])
