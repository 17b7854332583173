"""A checkpoint is complete or not there; what was there before stays until then."""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch.client.checkpoint import directory
from tests.engine.helpers import ROOT, S0, both_modes, full, mesh, spread
from tests.recovery.conftest import Victims


def value_of(path: Path) -> float:
    return float(full(dtorch.load(path)["a"])[0])


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may have more than 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_new_one_replaces_the_old(tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchanges:
        monkeypatch.setattr(directory, "_exchange", lambda a, b: False)
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "a")
    for number in range(3):
        dtorch.save({"a": spread(torch.full((4,), float(number)), mesh(2), S0)}, link, blocking=True)
        assert value_of(link) == number
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"] and link.is_symlink()


def test_between_two_steps_the_old_one_is_found(tmp_path: Path) -> None:
    dtorch.save({"a": torch.ones(1)}, tmp_path / "a", blocking=True)
    (tmp_path / "a").rename(tmp_path / ".a.previous")  # as a crash leaves it where directories cannot be exchanged
    assert value_of(tmp_path / "a") == 1


@both_modes
def test_a_full_disk_leaves_the_old_one(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    make = lambda n, size: {"a": spread(torch.full((size,), float(n)), mesh(2), S0), "plain": torch.zeros(size)}
    dtorch.save(make(1, 4), tmp_path / "a", blocking=True)
    request.getfixturevalue("full_disk")
    pending = dtorch.save(make(2, 1 << 16), tmp_path / "a")
    with pytest.raises(dtorch.SaveError, match=r"a was not saved: .*File too large") as caught:
        pending.wait()
    assert isinstance(caught.value, OSError)
    assert pending.done() and value_of(tmp_path / "a") == 1 and os.listdir(tmp_path) == ["a"]
    dtorch.save(make(3, 4), tmp_path / "a", blocking=True)  # somebody has been told
    assert value_of(tmp_path / "a") == 3


def test_the_next_save_tells(tmp_path: Path, full_disk: None) -> None:
    dtorch.save({"a": torch.zeros(1 << 16)}, tmp_path / "a")
    with pytest.raises(dtorch.SaveError, match="too large"):
        dtorch.save({"a": torch.zeros(4)}, tmp_path / "b")
    dtorch.save({"a": torch.zeros(4)}, tmp_path / "b", blocking=True)
    assert os.listdir(tmp_path) == ["b"]


def test_shutdown_tells(tmp_path: Path, full_disk: None, caplog: pytest.LogCaptureFixture) -> None:
    dtorch.save({"a": torch.zeros(1 << 16)}, tmp_path / "a")
    with caplog.at_level(logging.WARNING, "dtorch"):
        dtorch.shutdown()
    assert "was not saved" in caplog.text


@both_modes
def test_a_value_that_was_never_made(mode: str, tmp_path: Path) -> None:
    x = spread(torch.randn(4, 4), mesh(2), S0)
    lost = x[torch.tensor([1, 9])]
    pending = dtorch.save({"a": lost}, tmp_path / "a")
    with pytest.raises(dtorch.DtorchError, match="never made.*index 9"):
        pending.wait()
    assert not os.listdir(tmp_path)
    with pytest.raises(IndexError, match="index 9"):
        dtorch.synchronize()


def test_other_files_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(dtorch.SaveError, match=r"belong to no checkpoint and would be lost: notes\.txt"):
        dtorch.save({"a": 1}, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(dtorch.SaveError, match="is a file"):
        dtorch.save({"a": 1}, tmp_path / "notes.txt")


def test_what_ended_programs_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.saving-0123").mkdir()
    (tmp_path / ".a.saving-0123" / "state.safetensors").write_bytes(b"half")
    (tmp_path / ".ab.saving-0123").mkdir()
    dtorch.save({"a": torch.ones(1)}, tmp_path / "a", blocking=True)
    assert sorted(os.listdir(tmp_path)) == [".ab.saving-0123", "a"]
    busy = directory.Staging(str(tmp_path / "a"))
    dtorch.save({"a": torch.zeros(1)}, tmp_path / "a", blocking=True)
    assert os.path.isdir(busy.path)
    busy.abandon()


@pytest.mark.parametrize("damage", ["missing", "short", "manifest", "none", "version"])
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    place = tmp_path / "a"
    dtorch.save({"a": torch.ones(8)}, place, blocking=True)
    a, manifest = torch.zeros(8), place / directory.MANIFEST
    if damage == "missing":
        (place / "state.safetensors").unlink()
    elif damage == "short":
        os.truncate(place / "state.safetensors", 90)
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "version":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    else:
        manifest.unlink()
    with pytest.raises(dtorch.LoadError, match=r"is missing|is damaged|no manifest|no complete|format 99"):
        dtorch.load(place, into={"a": a})
    assert not a.any()


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def test_an_index_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("bad", Harmful()), ("odd", [1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(dtorch.LoadError, match=r"posix\.mkdir, which no index holds"):
        dtorch.load(tmp_path / "bad")
    with pytest.raises(dtorch.LoadError, match="no index of a checkpoint, but a list"):
        dtorch.load(tmp_path / "odd")
    assert not (tmp_path / "harm").exists()


def test_only_below_the_roots(tmp_path: Path) -> None:
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir()
    dtorch.shutdown()
    dtorch.init(mode="inline", file_roots=[str(tmp_path / "inside")])
    state = {"a": spread(torch.ones(4), mesh(2), S0)}
    dtorch.save(state, tmp_path / "inside" / "a", blocking=True)
    with pytest.raises(dtorch.SaveError, match="outside of the directories"):
        dtorch.save(state, tmp_path / "outside" / "a", blocking=True)
    assert not os.listdir(tmp_path / "outside")
    dtorch.shutdown()


def test_the_end_of_the_program_waits(tmp_path: Path) -> None:
    code = (
        "import sys, torch, dtorch; dtorch.init(mode='inline'); "
        "a = dtorch.full((1 << 20,), 2.0, device_mesh=dtorch.init_device_mesh('cpu', (2,)), placements=[dtorch.Shard(0)]); "
        "dtorch.save({'a': a}, sys.argv[1]); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], check=False, cwd=ROOT, timeout=250)
    assert done.returncode == 3 and value_of(tmp_path / "a") == 2


def test_a_worker_is_lost_amid_saves(tmp_path: Path) -> None:
    victims = Victims()
    with victims.graph:
        a = spread(torch.zeros(1 << 20), mesh(2), S0)
        for step in range(4):
            a.add_(1)
            before = victims.pids
            pending = dtorch.save({"a": a}, tmp_path / "a")
            os.kill(before[step % 2], signal.SIGKILL)
            a.mul_(1)
            pending.wait()
            assert bool((full(dtorch.load(tmp_path / "a", device_mesh=mesh(2))["a"]) == step + 1).all())
    victims.graph.close()


def test_kills() -> None:
    """Of the program itself; at length with ``benchmarks/save_kills.py --runs 30``."""
    command = [sys.executable, "benchmarks/save_kills.py", "--runs", "4", "--mode", "inline"]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert "every loss and checkpoint is right" in done.stdout, done.stderr
