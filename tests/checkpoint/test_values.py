"""What a state may hold, and what becomes of it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.engine.helpers import S0, S1, R, both_modes, equal, full, mesh, spread

KINDS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def same(got: Any, want: Any) -> bool:
    """Equal structure, types and bits; distributed tensors by their values."""
    got, want = full(got), full(want)
    if isinstance(want, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == want.dtype and equal(got, want)
    if isinstance(want, numpy.ndarray):
        return got.dtype == want.dtype and numpy.array_equal(got, want)
    if isinstance(want, dict):
        return list(got) == list(want) and all(same(got[k], v) for k, v in want.items())
    if isinstance(want, (list, tuple)):
        return type(got) is type(want) and len(got) == len(want) and all(map(same, got, want))
    return type(got) is type(want) and (got == want or want != want)


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    state = {
        "none": None, "yes": True, "whole": 2**80, "real": 0.1, "odd": [math.inf, -math.inf, math.nan, 1e-320], "text": "ä\n",
        "complex": 1 + 2j, "bytes": b"\0\xff", "pair": (1, [2, (3,)]), "numbers": {1: "a", (2, None): "b", "$": {}},
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "set": {1, 2}, "array": numpy.arange(6, dtype=numpy.int16),
        "scalar": numpy.float32(1.5), "python": random.getstate(), "empty": {}, "device": torch.device("cpu"),
    }  # fmt: skip
    dtorch.save(state, tmp_path / "a", blocking=True)
    assert same(dtorch.load(tmp_path / "a"), state)
    assert not list((tmp_path / "a").glob("*.pt"))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_types(kind: torch.dtype, tmp_path: Path) -> None:
    value = (torch.arange(24) % 2 == 0 if kind == torch.bool else torch.arange(24)).to(kind).view(4, 6)
    state = {"plain": value, "cut": spread(value, mesh(2), S1), "number": value[0, 1], "empty": value[:0]}
    dtorch.save(state, tmp_path / "a", blocking=True)
    got = dtorch.load(tmp_path / "a", device_mesh=mesh(2))
    assert same(got, state)
    assert got["cut"].placements == (S1,) and type(got["plain"]) is torch.Tensor


@both_modes
def test_pieces_come_to_their_places(mode: str, tmp_path: Path) -> None:
    value = torch.randn(5, 7, 6)
    x = torch.arange(60.0).view(10, 6)
    on = mesh(2, 2)
    state = {
        "rows": spread(value, on, S0, R), "inner": spread(value, on, S1, Shard(2)), "twice": spread(value, on, S1, S1),
        "whole": spread(value, on), "few": spread(x[:1], on, S0, S0), "turned": spread(x, on, S0, S1).t(),
        "view": spread(x, on, S0, R)[2:7, ::2], "segments": torch.cat([spread(x, on, S0, R), spread(x * 2, on, S0, R)]),
        "sum": spread(x, on, S1, R).sum(1), "conj": spread(torch.randn(4, 4, dtype=torch.complex64), on, S0, R).conj(),
    }  # fmt: skip
    assert any(p.is_partial() for p in state["sum"].placements)
    want = {name: full(t) for name, t in state.items()}
    dtorch.save(state, tmp_path / "a", blocking=True)
    with safe_open(tmp_path / "a" / "state.safetensors", "pt") as file:
        assert set(file.keys()) == set(state)
        for name, t in want.items():
            assert equal(file.get_tensor(name), t.resolve_conj()), name
    assert same(dtorch.load(tmp_path / "a", device_mesh=on), want)


@both_modes
def test_values_are_those_of_the_call(mode: str, tmp_path: Path) -> None:
    plain, cut = torch.zeros(1 << 18), spread(torch.zeros(1 << 18), mesh(2), S0)
    for step in range(4):
        state = {"plain": plain, "cut": cut, "half": cut[: 1 << 17], "step": step}
        pending = dtorch.save(state, tmp_path / str(step))
        plain.add_(1)
        cut.add_(1)
        state["step"] = -1
    pending.wait()
    assert pending.done()
    for step in range(4):
        got = dtorch.load(tmp_path / str(step), device_mesh=mesh(2))
        assert got["step"] == step
        for name in ("plain", "cut", "half"):
            assert bool((full(got[name]) == step).all()), (step, name)


def test_replicas_are_written_once_and_by_turns() -> None:
    from dtorch.client.checkpoint.layout import Writers

    on, writers = mesh(2, 2), Writers()
    found = [writers.positions(spread(torch.zeros(8, 8), on, *where)._h.spec) for where in ((R, R), (R, R), (S0, R), (S0, S1))]
    assert [len(positions) for positions in found] == [1, 1, 2, 4]
    assert found[0] != found[1]


def test_into_dicts_and_tensors(tmp_path: Path) -> None:
    value = torch.randn(6, 4)
    dtorch.save({"a": spread(value, mesh(2), S0), "b": [value, 3], "step": 7}, tmp_path / "a", blocking=True)
    a, b = spread(torch.zeros(6, 4), mesh(2, 2), S1, S0), torch.zeros(6, 4, dtype=torch.float64)
    into = {"a": a, "b": [b, None], "step": 0}
    assert dtorch.load(tmp_path / "a", into=into) is into
    assert into["a"] is a and a.placements == (S1, S0) and same(a, value)
    assert into["b"][0] is b and same(b, value.double())
    assert into["b"][1] == 3 and into["step"] == 7


def test_what_is_missing_is_said_before_anything_changes(tmp_path: Path) -> None:
    dtorch.save({"a": torch.ones(2), "b": {"c": 1}, "c": [torch.ones(3)]}, tmp_path / "a", blocking=True)
    a = torch.zeros(2)
    with pytest.raises(dtorch.LoadError, match=r"3 faults.*'b'\]\['d'\] is missing there; it has 'c'.*'e'\] is missing.*'c'\]\[0\] has shape \(3,\)"):
        dtorch.load(tmp_path / "a", into={"a": a, "b": {"d": 0}, "e": None, "c": [torch.zeros(2)]})
    assert not a.any()


def test_what_cannot_hold_the_values_is_said_before_anything_changes(tmp_path: Path) -> None:
    dtorch.save({"a": torch.ones(2), "b": torch.rand(3), "c": torch.ones(3, 4), "d": torch.ones(2), "e": [1]}, tmp_path / "a", blocking=True)
    a = torch.zeros(2)
    into = {"a": a, "b": torch.zeros(3, dtype=torch.int64), "c": torch.zeros(4).expand(3, 4), "d": 3, "e": "x"}
    with pytest.raises(
        dtorch.LoadError,
        match=r"'b'\] is of torch.float32 there, and of torch.int64 here.*'c'\] is expanded here.*'d'\] is a tensor there, and 3 here"
        r".*'e'\] is a container there, and 'x' here",
    ):
        dtorch.load(tmp_path / "a", into=into)
    assert not a.any()


def test_states_that_have_no_end(tmp_path: Path) -> None:
    circle: list[Any] = [1]
    circle.append(circle)
    with pytest.raises(dtorch.DtorchError, match=r"state\['o'\]\[1\]\[1\]\.\.\. has more than 100 levels, or contains itself"):
        dtorch.save({"o": circle}, tmp_path / "a")
    with pytest.raises(dtorch.DtorchError, match=r"state\['n'\] is of type int, which cannot be saved"):
        dtorch.save({"n": 10**5000}, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_generators_continue(tmp_path: Path) -> None:
    ours, plain = torch.Generator(device="dtorch").manual_seed(3), torch.Generator().manual_seed(4)
    draw = lambda: (torch.randn(4, generator=ours, device="dtorch").to_torch(), torch.randn(4, generator=plain))
    draw()
    dtorch.save({"ours": ours, "plain": plain}, tmp_path / "a", blocking=True)
    want = draw()
    dtorch.load(tmp_path / "a", into={"ours": ours, "plain": plain})
    assert same(draw(), want)


def test_all_faults_of_a_state_at_once(tmp_path: Path) -> None:
    class Odd:
        pass

    state = {"x": [Odd()], "y": torch.eye(2).to_sparse(), "z": torch.empty(2, device="meta")}
    with pytest.raises(dtorch.DtorchError, match=r"3 faults.*state\['x'\]\[0\] is of type Odd.*'y'.*sparse.*'z'.*meta"):
        dtorch.save(state, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_files_of_torch_are_left_to_torch(tmp_path: Path) -> None:
    dtorch.save({"a": 1}, tmp_path / "a.pt").wait()
    assert dtorch.load(tmp_path / "a.pt", weights_only=True) == torch.load(tmp_path / "a.pt") == {"a": 1}


def test_partial_placements_of_the_target(tmp_path: Path) -> None:
    dtorch.save({"a": torch.ones(4)}, tmp_path / "a", blocking=True)
    a = dtorch.DTensor(torch.zeros(4), device_mesh=mesh(2), placements=[Replicate()]).redistribute(placements=[Partial()])
    dtorch.load(tmp_path / "a", into={"a": a})
    assert same(a, torch.ones(4))
