"""`dtorch run` on a real mesh, compared with plain diffusers by its own --check."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

FAST = ("--steps", "2", "--height", "32", "--width", "48")


@pytest.mark.parametrize("model", ["sd3", "flux"])
def test_one_inline_device_draws_what_diffusers_draws(command, tmp_path: Path, model: str) -> None:
    done = command("run", model, "--prompt", "a photo of a cat", "--mode", "inline", "--mesh", "dp=1", "--check", *FAST)
    assert done.returncode == 0, done.stderr
    assert "largest difference from plain diffusers 0/255, allowed 0/255" in done.stdout
    with Image.open(tmp_path / f"{model}.png") as picture:
        assert picture.size == (48, 32)
        assert np.asarray(picture).std() > 5


def test_one_device_is_exact_for_a_batch_too(command) -> None:
    args = ("--mode", "inline", "--mesh", "dp=1", "--num-images", "2", "--check")
    done = command("run", "sd3", "--prompt", "a photo of a cat", *args, *FAST)
    assert done.returncode == 0, done.stderr


def test_two_local_devices_and_two_pictures(command, tmp_path: Path) -> None:
    args = ("--mode", "local", "--num-images", "2", "--negative-prompt", "dog", "--out", "cat.png", "--json", "--check",
            "--profile", "trace.json")  # fmt: skip
    done = command("run", "sd3", "--prompt", "a photo of a cat", *args, *FAST)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["images"] == ["cat-0.png", "cat-1.png"]
    assert all((tmp_path / name).is_file() for name in report["images"])
    assert report["mesh"] == {"dp": 2}
    assert report["mode"] == "local"
    assert report["check"]["ok"]
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {e["pid"] for e in trace if e["name"] == "linear"} == {10, 11}
    assert any(e["args"].get("module", "").startswith("SD3Transformer2DModel.transformer_blocks.0") for e in trace)
    assert "attributed" in done.stderr
    pids = {worker["pid"] for worker in report["workers"]}
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # nothing is left running


def test_a_folder_of_the_user(command, demo, tmp_path: Path) -> None:
    args = ("--model", demo("flux"), "--mode", "inline", "--mesh", "dp=2,tp=2", "--dtype", "bfloat16", "--check")
    done = command("run", "flux", "--prompt", "a red house", *args, *FAST)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "flux.png").is_file()
