"""The log without any process: what it keeps brings a fresh executor to the very state of the one that ran everything."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import dtorch
from dtorch.controller.log import Log
from dtorch.controller.stream import Node, Reader, needed
from dtorch.protocol import commands as C
from dtorch.worker.executor import Executor
from dtorch.worker.program import Poison

R, S0, S1 = dtorch.Replicate(), dtorch.Shard(0), dtorch.Shard(1)
AT = (1 << 60, 1 << 40)  # limits that are not reached


class Recorded:
    """A session in this process whose batches go to a log as well."""

    def __init__(self, log: Log) -> None:
        self.graph, self.log, self.done = dtorch.Graph(mode="inline"), log, -1
        self.run = self.graph.session.link.send_batch
        self.graph.session.link.send_batch = self.send  # type: ignore[method-assign]
        self.executor: Executor = self.graph.session.link._executor  # type: ignore[attr-defined]

    def send(self, seq: int, frames: Any, targets: Any = None, shared: bool = False) -> None:
        self.log.append(seq, (0,), [b"header", *map(bytes, frames)], shared)
        self.log.settle()
        self.done = seq
        self.run(seq, frames, targets, shared)

    def check(self) -> None:
        """Replay the log on a new executor and compare all that it holds."""
        replies: list[Any] = []
        again = Executor(list(self.executor.devices), replies.append)
        again.mute(1 << 60)
        if self.log.snapshot_path(0):
            again.restore(self.log.snapshot_path(0))
        for frames in self.log.past(0, self.done):
            again.run(frames[1:])
        assert again.serial == self.executor.serial
        assert not replies
        same_values(again, self.executor)


def no_memory(path: str, offset: int, count: int) -> bytes:
    raise OSError(path)


def kept(nodes: list[Node]) -> list[Node]:
    steps = needed(nodes, {})
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def same_values(got: Executor, want: Executor) -> None:
    assert got.store.keys() == want.store.keys()
    for number, local in want.store.items():
        if isinstance(local, Poison):
            assert got.store[number] == local
            continue
        for a, b in zip(got.store[number], local, strict=True):
            assert (a.dtype, a.shape, a.stride(), a.storage_offset()) == (
                b.dtype,
                b.shape,
                b.stride(),
                b.storage_offset(),
            )
            assert torch.equal(a.resolve_conj(), b.resolve_conj()), number
    known = want.generators.states()
    for number, state in got.generators.states().items():
        assert number not in known or torch.equal(state, known[number])


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    found = Recorded(Log(*AT, str(tmp_path), no_memory))
    with found.graph:
        yield found
    found.graph.close()


def mesh(count: int = 2) -> dtorch.DeviceMesh:
    return dtorch.DeviceMesh("cpu", list(range(count)), mesh_dim_names=["dp"])


def training() -> Iterator[Any]:
    """Steps of a small model with dropout, in-place buffers and an optimizer that updates lists of tensors in place."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )
    model = dtorch.parallelize(model, mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(6):
        loss = model(torch.randn(5, 6).to("dtorch")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model, optimizer, loss


def views() -> Iterator[Any]:
    """Writes through views, a tensor that is placed anew, tensors that come and go, two meshes, and a move between them."""
    x = dtorch.Tensor(torch.arange(24.0).reshape(4, 6), device_mesh=mesh(), placements=[S0])
    kept = []
    for step in range(8):
        row = x[1:3]
        row.add_(step)
        x.view(24)[3:9].mul_(1.5)
        y = (x @ x.t()).sum(0)
        y.redistribute(mesh(3), [S0]).add_(1)
        part = x.redistribute(placements=[S1])
        part[:, 0].zero_()
        if step % 3 == 0:
            kept.append(part)
        x.copy_(x + y.mean() * 0.01)
        (x.t().conj().real * 2).nonzero()
        yield x, row, kept


def draws() -> Iterator[Any]:
    """Random numbers of two generators, seeded again now and then, on meshes that take turns."""
    own = torch.Generator(device="dtorch")
    total = dtorch.zeros(4, device_mesh=mesh())
    for step in range(8):
        if step == 4:
            torch.manual_seed(11)
            own.manual_seed(3)
        total = total + dtorch.randn(4, device_mesh=mesh())
        wide = dtorch.rand(6, device_mesh=mesh(3), placements=[S0])
        total.add_(torch.rand(4, generator=own, device="dtorch"))
        yield total, wide


def captured() -> Iterator[Any]:
    """Calls that are replayed by one command: some only compute, some write a cache, some draw."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 6))
    model = dtorch.parallelize(model, mesh())
    x, cache = dtorch.Tensor(torch.ones(4, 6), device_mesh=mesh()), dtorch.zeros(4, 6, device_mesh=mesh())

    @dtorch.capture
    def pure(t: Any) -> Any:
        with torch.no_grad():
            return model[0](t).cos()

    @dtorch.capture
    def writes(t: Any) -> Any:
        with torch.no_grad():
            cache.add_(model(t))
            return cache[1:3], t * 2

    kept = []
    for step in range(8):
        y = pure(x)
        view, double = writes(x + step)
        if step == 5:
            kept.append(view)
        yield y, double, kept
    assert pure.replays and writes.replays


def anything() -> Iterator[Any]:
    """Operators in any order on tensors that come and go."""
    choose = random.Random(3)
    torch.manual_seed(3)
    places = ([R], [S0], [S1])
    pool = [dtorch.Tensor(torch.randn(4, 6), device_mesh=mesh(n), placements=choose.choice(places)) for n in (2, 2, 3)]

    def other(t: Any) -> Any:
        found = choose.choice([p for p in pool if p.device_mesh == t.device_mesh])
        return found if found.shape == t.shape else found.sum()

    acts: list[Callable[[Any], Any]] = [
        lambda t: t + other(t), lambda t: t.cos(), lambda t: t.mul_(0.9), lambda t: t.add_(other(t)), lambda t: t[1:3].neg_(),
        lambda t: t.t().contiguous().t(), lambda t: t.redistribute(placements=choose.choice(places)), lambda t: t.reshape(-1)[3:20],
        lambda t: t.redistribute(mesh(choose.choice((2, 3))), choose.choice(places)), lambda t: t.normal_(), lambda t: torch.rand_like(t),
        lambda t: t.copy_(other(t)), lambda t: t.sum(0, keepdim=True).expand(4, -1), lambda t: torch.where(t > 0, t, other(t)),
        lambda t: torch._foreach_mul_([t], 1.1), lambda t: torch.manual_seed(choose.randrange(9)), lambda t: t.softmax(-1),
        lambda t: (t @ t.t()) @ t, lambda t: t.detach(), lambda t: dtorch.Tensor(torch.randn(4, 6), device_mesh=t.device_mesh),
    ]  # fmt: skip
    for _ in range(12):
        for _ in range(25):
            made = choose.choice(acts)(choose.choice([t for t in pool if t.shape == (4, 6) and 0 not in t.stride()]))
            if isinstance(made, torch.Tensor):
                pool.append(made)
            while len(pool) > 9:
                pool.pop(choose.randrange(3, len(pool)))
        yield pool


PROGRAMS: list[Callable[[], Iterator[Any]]] = [training, views, draws, captured, anything]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("snapshot", [False, True], ids=["", "from a snapshot"])
def test_what_is_kept_makes_every_living_value_again(recorded, program, snapshot):
    for step, alive in enumerate(program()):
        recorded.graph.session.flush()
        recorded.check()
        if step % 2:
            recorded.log.shorten(recorded.done)
            recorded.check()
        if snapshot and step in (2, 4):
            recorded.executor.save(recorded.log.path(step, 0))
            assert recorded.log.cut(recorded.done, step, frozenset({0})) == (None if step == 2 else 2)
            assert not recorded.log._operators
            recorded.check()
        del alive


def test_what_is_dead_goes(recorded):
    x = dtorch.Tensor(torch.ones(3), device_mesh=mesh(), placements=[R])
    sizes = []
    for _ in range(4):
        for _ in range(50):
            x = (x + 1).cos().mul_(2)
            x = dtorch.Tensor(torch.ones(3), device_mesh=mesh(), placements=[R]) + (x * 0).detach().sum().item()
        recorded.graph.session.flush()
        recorded.log.shorten(recorded.done)
        recorded.check()
        sizes.append(len(recorded.log._nodes))
    assert sizes[1:] == sizes[:-1]


def test_calls_that_only_compute_go_when_their_results_are_dead(recorded):
    x = dtorch.Tensor(torch.ones(4, 6), device_mesh=mesh(), placements=[S0])
    weight = dtorch.Tensor(torch.ones(6, 6), device_mesh=mesh())

    @dtorch.capture
    def pure(t: Any) -> Any:
        return (t @ weight.t()).cos()

    for _ in range(20):
        y = pure(x)
    assert pure.replays > 10
    recorded.graph.session.flush()
    recorded.log.shorten(recorded.done)
    recorded.check()
    assert sum(node.code == C.REPLAY for node in recorded.log._nodes) == 1
    del y


def test_a_failure_is_repeated_with_its_number(recorded):
    x = dtorch.Tensor(torch.ones(4, 3), device_mesh=mesh(), placements=[S0])
    for _ in range(5):
        x * 2
    lost = x[torch.tensor([9])]
    recorded.graph.session.flush()
    recorded.log.shorten(recorded.done)
    replies: list[Any] = []
    again = Executor(list(recorded.executor.devices), replies.append)
    again.mute(1 << 60)
    for frames in recorded.log.past(0, recorded.done):
        again.run(frames[1:])
    same_values(again, recorded.executor)
    (poison,) = {v for v in recorded.executor.store.values() if isinstance(v, Poison)}
    headers = [msgpack.unpackb(frames[0]) for frames in replies]
    assert {(kind, serial) for kind, serial, *_ in headers} == {(C.ERROR, poison.serial)}
    with pytest.raises(IndexError):
        lost.to_torch()


def test_shared_memory_is_copied_at_once(tmp_path):
    memory = {"/proc/1/fd/7": bytearray(range(64))}
    log = Log(*AT, str(tmp_path), lambda path, offset, count: bytes(memory[path][offset : offset + count]))
    box = [[0, 2], [0, 3]]
    load = [C.LOAD, 5, 0, 0, 8, "float32", box, "a plain tensor"]
    log.append(0, (0,), [b"h", msgpack.packb([C.MAP, 0, "/proc/1/fd/7"])], False)
    log.append(1, (0,), [b"h", msgpack.packb([C.COUNT, 0, *load])], True)
    log.settle()
    memory["/proc/1/fd/7"][:] = bytes(64)
    for shorten in (False, True):
        if shorten:
            log.shorten(1)
        frames = next(f for f in log.past(0, 1) if len(f) > 2)
        assert bytes(frames[2]) == bytes(range(8, 32))
        words = msgpack.unpackb(frames[1])
        at = words.index(C.LOAD)
        assert words[at : at + 8] == [C.LOAD, 5, 0, -1, 0, "float32", box, "a plain tensor"]


def test_a_log_that_cannot_be_read_says_so(tmp_path):
    log = Log(*AT, str(tmp_path), no_memory)
    log.append(0, (0,), [b"h", msgpack.packb([C.FIRST_PLAN + 3, 1, 2])], False)
    log.shorten(0)
    assert "cannot be repeated" in log.fault
    log.append(1, (0,), [b"h", msgpack.packb([])], False)
    assert not [*log.open(0, -1)]


def test_a_generator_is_followed_to_its_last_seed():
    def seed(number: int, value: int | None) -> list[Any]:
        return [C.SEED, number, value]

    plan = [
        C.PLAN, 0, ["aten::randn.default", 0, [], 1, [], {}, [], [], [[0, None, False]], None, None, 2, [], []],
    ]  # fmt: skip
    draw = C.FIRST_PLAN
    stream = [
        *plan, *seed(0, 1), draw, 0, 1, -1, *seed(0, 2), draw, 0, 2, -2, draw, 0, 3, *seed(1, 5), draw, 1, 4, -4, *seed(1, None)
    ]  # fmt: skip
    nodes = Reader(no_memory).read([msgpack.packb(stream)])
    words = [node.words for node in kept(nodes) if node.code != C.PLAN]
    assert words == [seed(0, 2), [draw, 0, 2], [-2], [draw, 0, 3]]
