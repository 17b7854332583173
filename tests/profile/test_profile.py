"""What a profile says of a program whose operators, collectives and reads are known."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch.client import graph
from tests.engine.helpers import S0, S1, both_modes, mesh, spread


class Block(torch.nn.Module):
    """Two layers and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def line(text: str) -> str:
    """The first line of this file that has the text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{__file__}:{1 + next(k for k, found in enumerate(lines) if text in found)}"


def events(path: Path) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


@both_modes
def test_timeline(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Block(), Block())
    on = mesh(2)
    with on:
        model.to("dtorch")
    x = spread(torch.randn(6, 8), on, S0)
    turned = spread(torch.randn(6, 8), on, S1)
    with torch.no_grad(), dtorch.profile(tmp_path / "trace.json") as p:
        for _ in range(3):
            y = model(x)
            z = x @ turned.T @ y
            z.sum().item()
    found = events(tmp_path / "trace.json")
    linear = [e for e in found if e["name"] == "linear"]
    workers = {e["pid"] for e in linear}
    assert len(workers) == len(p.workers) == len(dtorch.workers())
    assert len(linear) == 3 * 4 * len(workers)
    assert {e["args"]["module"] for e in linear} == {f"Sequential.{k}.{part}" for k in "01" for part in ("up", "down")}
    assert {e["args"]["line"] for e in linear} == {line("self.down(torch.relu")}
    assert sorted({d for e in linear for d in e["args"]["devices"]}) == [0, 1]
    assert all(isinstance(e["args"]["plan"], int) for e in linear)
    moves = [
        e
        for e in found
        if e.get("cat") == "collective" and e["args"]["line"] == line("x @ turned.T") and e["args"]["bytes"]
    ]
    assert moves
    assert {e["args"]["for"] for e in moves} <= {"matmul", "mm", "t", "redistribute"}
    modules = [e for e in found if e.get("cat") == "module"]
    assert len(modules) == 3 * (1 + 2 + 4)
    assert {e["args"]["line"] for e in modules if e["name"] == "Sequential"} == {line("y = model(x)")}
    assert sum(e.get("cat") == "wait" and e["args"]["line"] == line("z.sum().item()") for e in found) >= 3
    assert {e["cat"] for e in found if e["pid"] == 1 and e["ph"] == "X"} >= {"plan", "flush", "wait", "module"}
    for share in p.workers:
        assert share.attributed >= 0.9  # of some milliseconds; of a longer program it is more
        assert share.operators + share.collectives + share.other + share.idle <= share.wall
        assert not share.lost
    summary = p.summary()
    assert "linear" in summary
    assert "attributed" in summary


@both_modes
def test_events_lie_within_each_other(tmp_path: Path) -> None:
    """On a worker's track every event is over before the one around it is, and before the next begins."""
    x = spread(torch.randn(8, 8), mesh(2), S0)
    with dtorch.profile(tmp_path / "trace.json"):
        for _ in range(4):
            x.redistribute(placements=[S1]).sum().item()
    found = [e for e in events(tmp_path / "trace.json") if e["pid"] != 1 and e["ph"] == "X" and e["tid"] == 1]
    assert {e["cat"] for e in found} >= {"operator", "collective", "engine"}
    for pid in {e["pid"] for e in found}:
        stack: list[float] = []
        for e in sorted((e for e in found if e["pid"] == pid), key=lambda e: (e["ts"], -e["dur"])):
            while stack and stack[-1] <= e["ts"] + 1e-6:
                stack.pop()
            assert not stack or e["ts"] + e["dur"] <= stack[-1] + 1e-3
            stack.append(e["ts"] + e["dur"])


@both_modes
def test_captured_calls_are_measured_operator_by_operator(tmp_path: Path) -> None:
    on = mesh(2)
    weight = spread(torch.randn(8, 8), on, S1)

    def work(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ weight) + 1

    x, captured = spread(torch.randn(4, 8), on), dtorch.capture(work)
    with torch.no_grad():
        want = [captured(x).to_torch() for _ in range(3)][-1]
        with dtorch.profile(tmp_path / "trace.json") as p:
            got = captured(x).to_torch()
    assert captured.replays >= 1
    assert torch.equal(got, want)
    ran = {t.name: t for t in p.operators if t.kind == "operator"}
    assert set(ran) >= {"matmul", "relu", "add"}
    assert all("work" in ran[name].module for name in ("matmul", "relu", "add"))
    assert {ran[name].line for name in ("matmul", "relu", "add")} == {line("relu(x @ weight)")}
    assert any(e["name"] == "captured call" for e in events(tmp_path / "trace.json"))
    with torch.no_grad():
        assert torch.equal(captured(x).to_torch(), want)


@both_modes
def test_a_failure_within_a_captured_call_is_told_as_ever() -> None:
    x, index = spread(torch.zeros(4), mesh(2)), spread(torch.tensor([1, 2]), mesh(2))

    def work(index: torch.Tensor) -> torch.Tensor:
        return (x + 1)[index] * 2

    captured = dtorch.capture(work)
    with torch.no_grad():
        for _ in range(3):
            captured(index)
        bad = index + spread(torch.tensor(7), mesh(2))
        with dtorch.profile(), pytest.raises(IndexError, match=r"test_profile.py"):
            captured(bad).to_torch()
        assert torch.equal(captured(index).to_torch(), torch.full((2,), 2.0))


def test_nothing_stays_behind() -> None:
    x = spread(torch.ones(4), mesh(2))
    session = graph.current_session()
    with dtorch.profile():
        assert session.sites.notes_threads
        (x + 1).to_torch()
        with pytest.raises(dtorch.DtorchError, match="running already"):
            dtorch.profile().__enter__()
    assert not session.sites.notes_threads
    assert not {"flush", "wait"} & session.__dict__.keys()
    module = torch.nn.modules.module
    assert not module._global_forward_pre_hooks
    assert not module._global_forward_hooks
    assert session.link._executor.profile is None


def test_sessions_that_begin_and_end_within(tmp_path: Path) -> None:
    with dtorch.profile(tmp_path / "trace.json") as p:
        other = dtorch.Graph(mode="inline")
        with other:
            (spread(torch.ones(4), dtorch.DeviceMesh("cpu", [0, 1])) * 3).to_torch()
        other.close()
    assert {t.name for t in p.operators} >= {"mul"}


def test_operators_of_other_threads() -> None:
    x = spread(torch.ones(4), mesh(2))
    model = torch.nn.Linear(4, 4)
    with mesh(2):
        model.to("dtorch")
    with dtorch.profile() as p:
        thread = threading.Thread(target=lambda: model(x.detach()).sum().to_torch())
        thread.start()
        thread.join()
        (x - 1).to_torch()
    modules = {t.name: t.module for t in p.operators}
    assert modules["sum"] == "test_operators_of_other_threads.<locals>.<lambda>"
    assert "Linear" in modules.values()
    assert modules["sub"] == "test_operators_of_other_threads"


def test_many_operators_are_fetched_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtorch.client.profile import measure

    monkeypatch.setattr(measure, "_PORTION", 10)
    x = spread(torch.ones(4), mesh(2))
    with dtorch.profile() as p:
        for _ in range(100):
            x = x + 1
        assert len(p._measuring[0]._requests) > 5
    (total,) = [t for t in p.operators if t.name == "add"]
    assert total.count == 100


def test_advice() -> None:
    on = mesh(2)
    x, w = spread(torch.randn(8, 512), on, S0), spread(torch.randn(512, 512), on, S0)
    (x @ w).sum().item()
    with torch.no_grad(), dtorch.profile() as p:
        for _ in range(5):
            y = x @ w
            y.sum().item()
    kinds = {a.kind: a for a in p.advice()}
    assert kinds["redistribution"].line == line("y = x @ w")
    assert "matmul redistributes an input" in kinds["redistribution"].text
    assert "5 times" in kinds["redistribution"].text
    assert all(a.gain > 0 and str(a).startswith(__file__) for a in p.advice())


def test_advice_on_reads_modules_and_devices() -> None:
    """From a timeline made up: in 10 ms the program issues a module and waits for a value, four times each."""
    from dtorch.client.profile.advice import advise
    from dtorch.client.profile.measure import Issued, Span
    from dtorch.client.profile.modules import Call
    from dtorch.client.profile.timeline import Event, Namer, WorkerTimeline
    from dtorch.protocol import events as E

    code = Block.forward.__code__
    module_site, read_site = (test_advice.__code__, 0), (test_timeline.__code__, 0)
    calls, spans, issued, work = [], [], [], []
    for k in range(4):
        t = k * 10_000_000
        call = Call("Block", 0, module_site)
        call.start, call.end = t, t + 6_000_000
        calls.append(call)
        issued += [Issued((code, 0), t + 100_000 * j, "Block", None) for j in range(20)]
        spans.append(Span("wait", t + 7_000_000, t + 10_000_000, 1, read_site))
        work.append(Event(E.OPERATOR, "mm", t + 5_000_000, t + 8_000_000, 3_000_000, 0, "model.py:3", "Block", (0,)))
    waits = [(low * 1_000_000, high * 1_000_000) for low, high in ((0, 5), (8, 15), (18, 25), (28, 35), (38, 40))]
    busy = WorkerTimeline(0, (0,), 0, 40_000_000, work, waits, 0)
    unused = WorkerTimeline(1, (1,), 0, 40_000_000, [], [(0, 40_000_000)], 0)
    namer = object.__new__(Namer)
    namer._lines = {}
    alone = {a.kind: a for a in advise([busy], spans, calls, issued, namer)}
    assert alone["read"].gain == pytest.approx(0.023)  # what follows each read
    assert "4 times" in alone["read"].text
    assert alone["read"].line.startswith(__file__)
    assert alone["capture"].gain == pytest.approx(0.020)
    assert "20 operators each" in alone["capture"].text
    assert "idle device" not in alone
    both = {a.kind: a for a in advise([busy, unused], spans, calls, issued, namer)}
    assert both["idle device"].line == "model.py:3"
    assert both["idle device"].gain == pytest.approx(0.006)
    assert "device 1 computes 0 %" in both["idle device"].text
