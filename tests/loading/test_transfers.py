"""Large values between the program and its workers: by shared memory, or from the file that they are mapped from."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dtorch
from dtorch.client import graph, shared
from dtorch.client.files import OpenFiles
from dtorch.worker.files import Files, SharedMemory
from tests.engine.helpers import S0, S1, R, both_modes, local_mode, mesh, run_program, start_program
from tests.loading.conftest import equal
from tests.transport.processes import is_alive, wait_until

SHAPES = [(600, 700), (3, 1, 100, 1001), (1, 1, 1 << 18), (1 << 19,), (150001, 2), (7, 11, 13, 17, 19)]


def order(x: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1]


@both_modes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_values_go_and_come(mode, shape):
    torch.manual_seed(0)
    plain = torch.randn(shape)
    for x in (
        plain, plain.double(), plain.bfloat16(), plain.transpose(0, -1), plain > 0, torch.complex(plain, plain).conj(),
        plain.flatten()[::2], plain[:1].expand(shape),
    ):  # fmt: skip
        for where in [R, *map(dtorch.Shard, range(x.dim()))]:
            d = dtorch.Tensor(x, device_mesh=mesh(2), placements=[where])
            assert equal(d, x.resolve_conj())
            assert d.stride() == torch.empty_like(x, device="meta").stride()
            assert order(d.to_torch()) == order(d)


@local_mode
def test_pieces_larger_than_the_arena(mode, monkeypatch):
    monkeypatch.setattr(shared, "_SLOT_BYTES", 4096)
    x = torch.randn(3, 700, 301)
    graph.current_session().arena.close()
    monkeypatch.setattr(graph.current_session(), "arena", shared.Arena(graph.current_session()))
    monkeypatch.setattr(shared, "ARENA", 10**6)
    for where in (R, S0, S1, dtorch.Shard(2)):
        assert equal(dtorch.Tensor(x, device_mesh=mesh(2), placements=[where]), x)
    assert equal(x.to("dtorch", torch.float64), x.double())
    dtorch.shutdown()


@local_mode
def test_the_source_can_be_changed_at_once(mode):
    x = torch.ones(3000, 1000)
    d = dtorch.Tensor(x, device_mesh=mesh(2), placements=[S0])
    x.zero_()
    assert equal(d, torch.ones(3000, 1000))


@local_mode
def test_fetched_values_are_memory_like_any_other(mode):
    d = dtorch.ones(1000, 600, device_mesh=mesh(2), placements=[S1])
    first, second = d.to_torch(), d.to_torch()
    first.zero_()
    assert equal(second, torch.ones(1000, 600))
    assert equal(d, torch.ones(1000, 600))
    futures = [d.add_(1).to_torch_async() for _ in range(3)]
    d.zero_()
    for i, future in enumerate(futures):
        assert equal(future.get(), torch.full((1000, 600), 2.0 + i))


@local_mode
def test_many_values_at_once(mode):
    d = dtorch.ones(1 << 18, device_mesh=mesh(2), placements=[S0])
    before = descriptors()
    futures = [d.add_(1).to_torch_async() for _ in range(150)]
    assert descriptors() <= before + 64  # a process has few
    for i, future in enumerate(futures):
        assert equal(future.get(), torch.full((1 << 18,), 2.0 + i))
    assert descriptors() == before


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@local_mode
def test_nothing_is_held(mode):
    x = torch.randn(1000, 600)
    d = dtorch.Tensor(x, device_mesh=mesh(2), placements=[S0])
    d.to_torch()
    before = descriptors()
    for _ in range(3):
        d = dtorch.Tensor(x, device_mesh=mesh(2), placements=[S0])
        values = [d.to_torch(), d.to_torch()]
        d.to_torch_async()  # never awaited
    dtorch.synchronize()
    assert descriptors() == before
    del values


@local_mode
def test_a_lost_value_is_an_error_and_no_leak(mode):
    bad = torch.ones(700, 600, device="dtorch").to(torch.int64)
    bad = bad.scatter(0, torch.full((700, 600), 900).to("dtorch"), 1)
    before = descriptors()
    with pytest.raises(RuntimeError, match="scatter"):
        bad.to_torch()
    assert descriptors() == before


@local_mode
def test_threads(mode):
    on = mesh(2)
    failures = []

    def work(number: int) -> None:
        x = torch.full((500, 700), float(number))
        wrong = [number for _ in range(5) if not equal(dtorch.Tensor(x, device_mesh=on, placements=[S0]), x)]
        failures.extend(wrong)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_a_killed_program_leaves_nothing(mode, tmp_path):
    before = set(os.listdir("/dev/shm"))
    process = start_program(
        "import torch, dtorch\n"
        "mesh = dtorch.DeviceMesh('cpu', [0])\n"
        "x = torch.ones(1 << 24)\n"
        "d = dtorch.Tensor(x, device_mesh=mesh)\n"
        "print(*[w.pid for w in dtorch.workers()], flush=True)\n"
        "while True: y = dtorch.Tensor(x, device_mesh=mesh).to_torch()\n",
        tmp_path, mode="local",
    )  # fmt: skip
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    assert pids
    assert wait_until(lambda: not any(map(is_alive, pids)))
    assert set(os.listdir("/dev/shm")) == before


# -- memory of files -------------------------------------------------------------------------------------------------
@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that workers were told to read, one entry a tensor."""
    seen: list[str] = []
    emit = OpenFiles._emit

    def note(self: OpenFiles, tensor_id: int, spec: object, entry: object, *rest: object) -> None:
        seen.append(entry.path)  # type: ignore[attr-defined]
        emit(self, tensor_id, spec, entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(OpenFiles, "_emit", note)
    return seen


@both_modes
def test_mapped_memory_is_read_by_the_workers(mode, file, values, loads):
    plain = load_file(file)
    on = mesh(2)
    large = [name for name, x in values.items() if x.numel() * x.element_size() >= 1 << 20]
    for name in values:
        for where in [R, *map(dtorch.Shard, range(values[name].dim()))]:
            assert equal(dtorch.Tensor(plain[name], device_mesh=on, placements=[where]), values[name])
        assert equal(plain[name].to("dtorch", torch.complex128), values[name].to(torch.complex128))
    assert len(loads) == sum(2 + values[n].dim() for n in large)
    assert set(loads) == {str(file)}


def test_parts_of_mapped_memory(file, values, loads):
    plain = load_file(file)["rows"]
    part = plain[100:650]
    assert equal(dtorch.Tensor(part, device_mesh=mesh(2), placements=[S1]), values["rows"][100:650])
    assert equal(dtorch.Tensor(plain.view(-1)[7:], device_mesh=mesh(1)), values["rows"].view(-1)[7:])
    assert len(loads) == 2
    assert equal(dtorch.Tensor(plain.t(), device_mesh=mesh(2), placements=[S0]), values["rows"].t())
    assert len(loads) == 2  # another order than the file's


def test_memory_that_was_written_is_not(file, values, loads):
    plain = load_file(file)["rows"]
    plain[350, 7] = 12345.0
    want = values["rows"].clone()
    want[350, 7] = 12345.0
    assert equal(dtorch.Tensor(plain, device_mesh=mesh(2), placements=[S0]), want)
    assert not loads
    module = torch.nn.Linear(501, 700)
    module.weight = torch.nn.Parameter(load_file(file)["rows"])
    torch.nn.init.zeros_(module.weight)
    assert equal(module.to("dtorch").weight, torch.zeros(700, 501))
    assert not loads


def test_files_that_torch_maps(tmp_path, loads):
    x = torch.randn(700, 501)
    torch.save({"x": x, "y": x + 1}, tmp_path / "x.pt")
    state = torch.load(tmp_path / "x.pt", mmap=True)
    assert equal(state["y"].to("dtorch"), x + 1)
    assert len(loads) == 1
    both = torch.from_file(str(tmp_path / "x.raw"), shared=True, size=1 << 19)  # its owner may write to the file later
    both.fill_(1)
    assert equal(both.to("dtorch"), torch.ones(1 << 19))
    assert len(loads) == 1


@local_mode
@pytest.mark.parametrize("later", ["remove", "replace", "change"])
def test_the_file_of_mapped_memory_is_another_by_now(mode, tmp_path, later, loads):
    path = tmp_path / "x.safetensors"
    x = torch.randn(700, 501)
    save_file({"x": x}, path)
    on = mesh(2)
    plain = load_file(path)["x"]
    first = dtorch.Tensor(plain, device_mesh=on)
    if later == "remove":
        path.unlink()
    elif later == "replace":
        save_file({"x": x + 5}, tmp_path / "new")
        (tmp_path / "new").rename(path)
    else:
        assert equal(first, x)
        save_file({"x": x + 5}, path)
        x = plain.clone()  # the mapping shows the new bytes
    assert equal(dtorch.Tensor(plain, device_mesh=on, placements=[S0]), x)


def test_shared_memory_is_no_way_to_files(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 5000)
    with path.open("r+b") as file:
        descriptor = os.memfd_create("other")  # could shrink
        os.ftruncate(descriptor, 5000)
        for name in (str(path), "../x", f"/proc/{os.getpid()}/fd/../../../{path}"):
            with pytest.raises(RuntimeError, match="names no shared memory"):
                Files().map(1, name)
        for number, text in ((file.fileno(), "names no shared memory"), (descriptor, "could shrink")):
            with pytest.raises(RuntimeError, match=text):
                SharedMemory(f"/proc/{os.getpid()}/fd/{number}")
        os.close(descriptor)
    memory = shared.Segment(100)
    for offset, count in ((-4, 1), (96, 2), (200, 1)):
        with pytest.raises(RuntimeError, match="of shared memory of 100 bytes"):
            SharedMemory(memory.path).tensor(offset, (count,), (1,), torch.float32)


def test_null_workers_take_uploads(mode, tmp_path):
    done = run_program(
        "import torch, dtorch\n"
        "dtorch.init(mode='local', null_workers=2)\n"
        "d = dtorch.Tensor(torch.ones(1 << 23), device_mesh=dtorch.DeviceMesh('cpu', [0, 1]))\n"
        "print(d.shape)\n",
        tmp_path,
    )  # fmt: skip
    assert done.stdout == "torch.Size([8388608])\n"


def test_large_values_to_disk_and_back(file: Path, values):
    """The way back from sharded tensors: complete, in the file's order."""
    d = dtorch.Tensor(values["rows"], device_mesh=mesh(2), placements=[S1])
    again = file.parent / "again.safetensors"
    save_file({"rows": d}, again)
    assert equal(load_file(again)["rows"], values["rows"])
    again.unlink()
