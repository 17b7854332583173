"""Short names for what the engine's tests do."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

ROOT = Path(__file__).resolve().parents[2]
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()

# Options of a session, by mode: as many processes and threads on every machine.
OPTIONS: dict[str, dict[str, Any]] = {
    "inline": {"mode": "inline"}, "local": {"mode": "local", "workers": 2, "threads": 1},
}  # fmt: skip

both_modes = pytest.mark.parametrize("mode", ["inline", "local"], indirect=True)
local_mode = pytest.mark.parametrize("mode", ["local"], indirect=True)


def mesh(*shape: int, first: int = 0, names: Sequence[str] | None = None) -> dtorch.DeviceMesh:
    """A mesh of this shape over the devices from number ``first`` on."""
    count = torch.Size(shape).numel()
    return dtorch.DeviceMesh("cpu", (torch.arange(count) + first).reshape(shape), mesh_dim_names=names)


def spread(value: Any, on: dtorch.DeviceMesh, *placements: Any) -> Any:
    """A distributed tensor of the value; without placements replicated."""
    return dtorch.Tensor(value, device_mesh=on, placements=list(placements) or None)


def full(x: Any) -> Any:
    """The plain value of a plain or distributed tensor."""
    return x.detach().to_torch() if isinstance(x, dtorch.Tensor) else x


def same(got: Any, want: torch.Tensor, placements: Sequence[Any] | None = None) -> None:
    """Equal shape, strides of memory order, dtype and every bit (nan equals nan); and the placements, when given."""
    assert isinstance(got, dtorch.Tensor), f"{type(got).__name__} is not distributed"
    if placements is not None:  # before reading, which reduces what is Partial
        assert list(got.placements) == list(placements)
    value = full(got)
    assert tuple(got.shape) == tuple(value.shape) == tuple(want.shape)
    assert got.dtype == value.dtype == want.dtype
    assert equal(value, want), f"{value}\n instead of\n{want}"


def equal(value: torch.Tensor, want: torch.Tensor) -> bool:
    """Every bit the same, where any nan is as good as another."""
    value, want = value.detach().resolve_conj().resolve_neg(), want.detach().resolve_conj().resolve_neg()
    if want.dtype == torch.complex32 or (want.is_floating_point() and want.dtype.itemsize == 1):
        wide = torch.complex64 if want.dtype == torch.complex32 else torch.float32  # torch can hardly compare these
        value, want = value.to(wide), want.to(wide)
    if want.is_floating_point() or want.is_complex():
        value, want = torch.nan_to_num(value, 0.25), torch.nan_to_num(want, 0.25)
    return torch.equal(value, want)


def close(got: Any, want: torch.Tensor) -> None:
    """Equal up to another order of summing."""
    assert isinstance(got, dtorch.Tensor), f"{type(got).__name__} is not distributed"
    torch.testing.assert_close(full(got), want.detach())


def layouts(ndim: int, on: dtorch.DeviceMesh, partial: bool = True) -> Iterator[tuple[Any, ...]]:
    """Every placement of a tensor of ``ndim`` dimensions on the mesh."""
    kinds = [R, *(Shard(d) for d in range(ndim)), *([P] if partial else [])]
    yield from itertools.product(kinds, repeat=on.ndim)


def run_program(
    text: str, tmp_path: Path, *, mode: str | None = None, timeout_s: float = 60, check: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, as ``python program.py``."""
    process = start_program(text, tmp_path, mode=mode, **env)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
        process.wait()
    if check:
        assert process.returncode == 0, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_program(text: str, tmp_path: Path, *, mode: str | None = None, **env: str) -> subprocess.Popen[str]:
    """Start a program of its own; its standard output is read line by line."""
    path = tmp_path / "program.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    if mode is not None:
        environment["DTORCH_MODE"] = mode
    return subprocess.Popen(
        [sys.executable, str(path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
