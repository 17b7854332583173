"""Workers read files below the allowed directories only, however those are named; the client knows before it asks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dtorch
from dtorch.client import graph
from dtorch.client.files import RefusedError
from dtorch.client.weights import load_safetensors
from dtorch.core.config import SessionConfig, from_environment
from dtorch.core.errors import DtorchError, LoadError
from dtorch.worker.files import Files
from tests.engine.helpers import S0, mesh, run_program
from tests.loading.conftest import equal


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Path]:
    """A directory that may be read, one that may not, and ways from one to the other."""
    inside, outside = tmp_path / "inside", tmp_path / "inside-not"
    for folder in (inside, outside):
        folder.mkdir()
        save_file({"w": torch.arange(300000.0)}, folder / "w.safetensors")
    (inside / "link.safetensors").symlink_to(outside / "w.safetensors")
    (inside / "folder").symlink_to(outside)
    (outside / "back.safetensors").symlink_to(inside / "w.safetensors")
    return {
        "inside": inside, "plain": inside / "w.safetensors", "back": outside / "back.safetensors",
        "outside": outside / "w.safetensors", "dots": inside / ".." / outside.name / "w.safetensors",
        "link": inside / "link.safetensors", "folder link": inside / "folder" / "w.safetensors",
    }  # fmt: skip


ALLOWED, REFUSED = ["plain", "back"], ["outside", "dots", "link", "folder link"]


@pytest.fixture(params=["inline", "local"])
def rooted(request: pytest.FixtureRequest, mode: str, tree: dict[str, Path]) -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(mode=request.param, workers=1, file_roots=[str(tree["inside"])])
    yield
    dtorch.shutdown()
    dtorch.init(mode="inline")


def test_the_client_refuses(rooted, tree):
    for name in ALLOWED:
        assert equal(load_safetensors(tree[name], mesh(2), {"w": [S0]})["w"], torch.arange(300000.0))
    for name in REFUSED:
        with pytest.raises(LoadError, match=r"'w' is not loaded: .*inside-not/w\.safetensors lies outside"):
            load_safetensors(tree[name], mesh(2))


def test_the_workers_refuse_by_themselves(rooted, tree):
    session = graph.session_of(mesh(2))
    object.__setattr__(session.config, "file_roots", None)  # a client that has been tampered with
    for name in REFUSED:
        with pytest.raises(LoadError, match=r"lies outside of the directories that workers may read \(.*inside\)"):
            load_safetensors(tree[name], mesh(2))
    assert equal(load_safetensors(tree["plain"], mesh(2))["w"], torch.arange(300000.0))


def test_values_still_reach_the_workers(rooted, tree):
    """Moving a plain tensor is no reading of files: where workers may not read them, its bytes are sent."""
    mapped = load_file(tree["outside"])["w"]
    assert equal(dtorch.Tensor(mapped, device_mesh=mesh(2), placements=[S0]), torch.arange(300000.0))


def test_roots_are_checked(tmp_path, monkeypatch):
    (tmp_path / "a:b").mkdir()
    for roots, text in (
        ([str(tmp_path / "none")], "is not a directory"), ([str(tmp_path / "a:b")], "separates directories"),
        (str(tmp_path), "must be a list of directories"),
    ):  # fmt: skip
        with pytest.raises(DtorchError, match=text):
            SessionConfig(file_roots=roots)
    monkeypatch.setenv("DTORCH_FILE_ROOTS", os.pathsep.join([str(tmp_path / "x" / ".."), "/tmp"]))
    with pytest.raises(DtorchError, match="is not a directory"):
        from_environment()
    (tmp_path / "x").mkdir()
    assert from_environment().file_roots == (os.path.realpath(tmp_path), os.path.realpath("/tmp"))
    monkeypatch.setenv("DTORCH_FILE_ROOTS", "")
    assert from_environment().file_roots == ()


def test_a_client_cannot_widen_them(tree, tmp_path):
    """What a worker is told for its own environment comes too late."""
    done = run_program(
        f"""
import torch, dtorch
from dtorch.client.weights import load_safetensors
from dtorch.launch import session_link
dtorch.init(mode="local", workers=1, file_roots=[{str(tree["inside"])!r}])
session = dtorch.client.graph.current_session()
add = session.link._link.add_worker
session.link._link.add_worker = lambda devices, threads, env: add(devices, threads, {{**env, "DTORCH_FILE_ROOTS": "/"}})
object.__setattr__(session.config, "file_roots", None)
try:
    load_safetensors({str(tree["outside"])!r}, dtorch.DeviceMesh("cpu", [0]))
except dtorch.core.errors.LoadError as e:
    print("refused" if "lies outside" in str(e) else e)
""",
        tmp_path,
    )
    assert done.stdout == "refused\n"


def test_only_regular_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    files = Files(None)
    for path in (tmp_path / "pipe", tmp_path / "folder", Path("/dev/null")):
        with pytest.raises(OSError, match=re.escape(f"{path}")):
            files.open(1, str(path), 0, os.stat(path).st_mtime_ns)
    assert not files._sources
    on = mesh(1)
    with pytest.raises((RefusedError, OSError)):
        graph.session_of(on).files.load(
            1, dtorch.zeros(2, device_mesh=on)._h.spec, str(tmp_path / "pipe"), 0, torch.float32, "x", (run_program.__code__, 0)
        )
