"""Weights that stay in their file's memory keep their values, whatever happens to the file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dtorch
from dtorch.client.weights import load_safetensors
from tests.engine.helpers import S0, S1, R, local_mode, mesh
from tests.loading.conftest import equal
from tests.transport.processes import wait_until

pytestmark = local_mode
WANT = torch.arange(2 << 20).float().view(1 << 11, 1 << 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"w": WANT, "other": WANT + 1}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def mapped(path: Path) -> int:
    """How often the workers have the file mapped."""
    lines = [line for w in dtorch.workers() for line in Path(f"/proc/{w.pid}/maps").read_text().splitlines()]
    return sum(str(path) in line for line in lines)


def opened(path: Path) -> int:
    """How many descriptors of the file the workers hold."""
    found = 0
    for w in dtorch.workers():
        for descriptor in Path(f"/proc/{w.pid}/fd").iterdir():
            found += os.path.islink(descriptor) and os.readlink(descriptor).startswith(str(path))
    return found


def test_what_is_mapped(mode, path):
    on = mesh(2)
    whole = load_safetensors(path, on, {"w": [R]})
    assert mapped(path) == 4  # two tensors on two devices
    rows = load_safetensors(path, on, {"w": [S0], "other": [S1]})
    assert mapped(path) == 6
    assert equal(rows["w"], WANT)
    assert equal(rows["other"], WANT + 1)
    assert equal(whole["w"], WANT)
    del whole, rows
    assert mapped(path) == 0
    assert wait_until(lambda: opened(path) == 0, 5)  # nothing is held open while nothing happens


def test_each_has_its_own(mode, path):
    """Also replicas in one worker, and a second tensor of the same bytes."""
    on = mesh(2, 2)
    first, second = (load_safetensors(path, on)["w"] for _ in range(2))
    first.add_(1)
    first[3].zero_()
    want = WANT + 1
    want[3] = 0
    assert equal(first, want)
    for device in range(4):
        assert equal(first.to_local(device), want)
        assert equal(second.to_local(device), WANT)
    assert equal(load_safetensors(path, on)["w"], WANT)


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def patch(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\xff" * 5000)


def save_again(path: Path) -> None:
    save_file({"w": WANT * 3}, path)


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    overwrite_with = path.with_suffix(".new")
    overwrite_with.write_bytes(b"\xff" * path.stat().st_size)
    overwrite_with.rename(path)


def by_another_process(path: Path) -> None:
    code = f"open({str(path)!r}, 'r+b').write(b'\\xff' * 3000000)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


@pytest.mark.parametrize("change", [overwrite, cut, patch, save_again, remove, replace, by_another_process])
def test_the_file_changes_later(mode, path, change: Callable[[Path], None]):
    on = mesh(2)
    whole, rows = load_safetensors(path, on)["w"], load_safetensors(path, on, {"w": [S0]})["w"]
    changed = load_safetensors(path, on)["w"]
    changed[7].zero_()
    assert mapped(path)
    start = time.monotonic()
    change(path)
    assert time.monotonic() - start < 10, "whoever writes must not wait for the lease to run out"
    assert equal(whole, WANT)
    assert equal(rows, WANT)
    want = WANT.clone()
    want[7] = 0
    assert equal(changed, want)
    whole += rows  # still memory like any other
    assert equal(whole, WANT * 2)


def test_a_file_that_is_being_written_is_read(mode, path):
    with path.open("r+b"):
        loaded = load_safetensors(path, mesh(2))
        dtorch.synchronize()
    assert mapped(path) == 0
    assert equal(loaded["w"], WANT)
