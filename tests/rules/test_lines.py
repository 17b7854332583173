"""Plans that are told from others by arithmetic are those that the planner makes, for every operator, shape and placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtorch
from dtorch.planner.call import Call
from dtorch.planner.lines import Line
from dtorch.planner.plan import make_plan
from tests.rules.sweep import compare, spread

Run = Callable[..., Any]



# name -> (run, shapes of the inputs; -1 is the length that varies). Run gets the inputs and the length.
CASES: dict[str, tuple[Run, tuple[tuple[int, ...], ...]]] = {
    "add": (lambda x, y, n: x + y, ((2, 4, -1), (4, -1))),
    "add a row": (lambda x, y, n: x + y, ((2, -1, 4), (4,))),
    "in place": (lambda x, y, n: x.mul_(y), ((4, -1), (4, 1))),
    "where": (lambda x, y, n: torch.where(x > y, x, y), ((4, -1), (1, -1))),
    "cat": (lambda x, y, n: torch.cat([x, y], 2), ((2, 4, -1, 4), (2, 4, 1, 4))),
    "cat of views": (lambda x, y, n: torch.cat([x.transpose(1, 2), y], 2), ((2, -1, 4, 4), (2, 4, 1, 4))),
    "stack": (lambda x, y, n: torch.stack([x, y], 1), ((4, -1), (4, -1))),
    "view": (lambda x, n: x.view(4, n, 2, 3), ((4, -1, 6),)),
    "flatten": (lambda x, n: x.reshape(x.shape[0], -1), ((4, -1, 6),)),
    "fold": (lambda x, n: x.transpose(1, 2).reshape(4, n, 8), ((4, 2, -1, 4),)),
    "expand": (lambda x, n: x[:, :, None].expand(2, 4, 3, n, 4).reshape(2, 12, n, 4), ((2, 4, -1, 4),)),
    "stretch": (lambda x, n: x.expand(4, n) + 1, ((4, 1),)),
    "repeat": (lambda x, n: x.repeat(2, 1, 1), ((2, 4, -1),)),
    "transpose": (lambda x, n: x.transpose(0, 2).clone(), ((4, 2, -1),)),
    "permute": (lambda x, n: x.permute(2, 0, 1).contiguous(), ((4, 2, -1),)),
    "slice to the end": (lambda x, n: x[:, 1:], ((4, -1),)),
    "slice of the end": (lambda x, n: x[:, -5:].clone(), ((4, -1),)),
    "slice of the start": (lambda x, n: x[:, :6] * 2, ((4, -1),)),
    "slice in between": (lambda x, n: x[:, 2:-3] * 2, ((4, -1),)),
    "growing slice": (lambda x, n: x[:, :n].clone(), ((4, 12),)),
    "moving slice": (lambda x, n: x[:, n - 1 : n + 3].clone(), ((4, 12),)),
    "slice with a step": (lambda x, n: x[:, ::2] * 2, ((4, -1),)),
    "select": (lambda x, n: x[:, -1] * 2, ((4, -1, 4),)),
    "split": (lambda x, n: x.split(3, 1), ((4, -1),)),
    "split in two": (lambda x, n: x.split([1, n - 1], 1), ((4, -1),)),
    "unbind": (lambda x, n: x.unbind(1), ((4, 2, -1),)),
    "matmul": (lambda x, y, n: x @ y, ((2, 4, 1, 4), (2, 4, 4, -1))),
    "weights": (lambda x, y, n: x.softmax(-1) @ y, ((2, 4, 1, -1), (2, 4, -1, 4))),
    "linear": (lambda x, y, n: F.linear(x, y), ((2, -1, 4), (6, 4))),
    "attention": (lambda x, y, n: F.scaled_dot_product_attention(x, y, y), ((2, 4, 1, 4), (2, 4, -1, 4))),
    "square attention": (lambda x, n: F.scaled_dot_product_attention(x, x, x), ((2, 4, -1, 4),)),
    "masked attention": (
        lambda x, y, m, n: F.scaled_dot_product_attention(x, y, y, attn_mask=m), ((2, 4, 1, 4), (2, 4, -1, 4), (2, 1, 1, -1)),
    ),
    "shared heads": (
        lambda x, y, n: F.scaled_dot_product_attention(x, y, y, enable_gqa=True), ((2, 4, 1, 4), (2, 2, -1, 4)),
    ),
    "layer norm": (lambda x, n: F.layer_norm(x, (6,)), ((2, -1, 6),)),
    "sum": (lambda x, n: x.sum(1), ((4, -1, 6),)),
    "kept": (lambda x, n: x.amax(-1, keepdim=True), ((4, 2, -1),)),
    "largest": (lambda x, n: x.max(1), ((4, -1),)),
    "running": (lambda x, n: x.cumsum(1), ((4, -1),)),
    "pairs": (lambda x, n: x[:, :, None] * x[:, None, :], ((4, -1),)),
    "triangle": (lambda x, n: (x[:, None] * x).tril(), ((-1,),)),
    "sorted": (lambda x, n: x.sort(1).values, ((4, -1),)),
    "topk": (lambda x, n: x.topk(2, 1).values, ((4, -1),)),
    "windows": (lambda x, n: x.unfold(1, 2, 2), ((4, -1),)),
    "diagonal": (lambda x, n: x.diagonal(), ((6, -1),)),
}  # fmt: skip
LENGTHS = st.lists(st.integers(2, 14), min_size=3, max_size=5, unique=True)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Compares each plan that is told with one made afresh; names of their operators."""
    names: list[str] = []
    plan_of = Line.plan_of

    def checked(line: Line, call: Call, t: int) -> Any:
        plan, fresh = plan_of(line, call, t), make_plan(call, call.first.mesh)
        for f in fields(plan):
            assert f.name == "call" or getattr(plan, f.name) == getattr(fresh, f.name), f"{call.func} {call.specs}: {f.name}"
        assert plan.call is call
        names.append(call.name)
        return plan

    monkeypatch.setattr(Line, "plan_of", checked)
    yield names
    dtorch.synchronize()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(start=LENGTHS, data=st.data())
def test_as_planned(name: str, start: list[int], data: st.DataObject) -> None:
    """Values and plans, at lengths that grow by one, at odd ones and at those that equal other sizes by chance."""
    run, shapes = CASES[name]
    parts = data.draw(st.sampled_from([1, 2, 3]))
    mesh = dtorch.DeviceMesh("cpu", list(range(parts)))
    cut = data.draw(st.sampled_from([None, *(d for d in range(3))]))
    placements = [dtorch.Replicate() if cut is None or cut >= len(s) else dtorch.Shard(cut) for s in shapes]
    first = data.draw(st.integers(2, 9))
    for n in (*start, *range(first, first + 5), 4, 6, 12, 2, 1, 3):
        values = [torch.randn([n if size < 0 else size for size in s]) for s in shapes]
        try:
            want = run(*(v.clone() for v in values), n)
        except RuntimeError:
            continue  # torch refuses such a length
        inputs = [spread(v, mesh, [p]) for v, p in zip(values, placements, strict=True)]
        got = run(*inputs, n)
        compare(_listed(got), _listed(want), True, f"{name}, length {n}, {placements}")


def _listed(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


# The dimension along which each input is cut.
GROWING: dict[str, tuple[int | None, ...]] = {
    "add": (1, 0), "cat": (1, 1), "cat of views": (2, 1), "view": (0,), "fold": (1,), "expand": (1,), "slice to the end": (0,),
    "slice of the end": (0,), "select": (0,), "split in two": (0,), "matmul": (1, 1), "weights": (1, 1), "linear": (None, 0),
    "attention": (1, 1), "masked attention": (1, 1, None), "shared heads": (1, 1), "sum": (0,), "sorted": (0,),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("parts", [1, 2])
def test_nothing_is_planned_while_a_sequence_grows(name: str, parts: int) -> None:
    """On one device, and cut along heads or features: after the third length no call is planned, whatever sizes it meets."""
    run, shapes = CASES[name]
    dtorch.shutdown()  # what other tests found is forgotten
    dtorch.init(mode="inline")
    mesh = dtorch.DeviceMesh("cpu", list(range(parts)))
    placements = [dtorch.Replicate() if d is None else dtorch.Shard(d) for d in GROWING[name]]
    for n in range(7, 19):
        values = [torch.randn([n if size < 0 else size for size in s]) for s in shapes]
        inputs = [spread(v, mesh, [p]) for v, p in zip(values, placements, strict=True)]
        before = dtorch.plan_stats()["planned"]
        run(*inputs, n)
        assert n < 10 or dtorch.plan_stats()["planned"] == before, f"length {n}"


@pytest.mark.parametrize("name", ["split", "windows", "slice with a step", "diagonal"])
def test_never_told(name: str, told: list[str]) -> None:
    """Whose results are no polynomials of the sizes."""
    run, shapes = CASES[name]
    mesh = dtorch.DeviceMesh("cpu", [0])
    for n in range(2, 20):
        run(*(spread(torch.randn([n if size < 0 else size for size in s]), mesh, [dtorch.Replicate()]) for s in shapes), n)
    assert not {f"aten.{x}" for x in ("split", "unfold", "slice", "diagonal")}.intersection(told)


def test_refused_as_ever() -> None:
    """A call that torch refuses is refused, also where all before it were told."""
    mesh = dtorch.DeviceMesh("cpu", [0])
    for n in range(4, 12):
        x, y = (spread(torch.randn(4, k), mesh, [dtorch.Replicate()]) for k in (n, n))
        x + y
        z = spread(torch.randn(4, n + 1), mesh, [dtorch.Replicate()])
        with pytest.raises(RuntimeError, match="size of tensor|must match|broadcast"):
            x + z
