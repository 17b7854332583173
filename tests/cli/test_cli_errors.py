"""Wrong input: one line on stderr, exit code 2, before any worker is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dtorch.cli import image_job, run
from dtorch.cli.image_job import Check


def complaint(result, exit_code: int = 2) -> str:
    """The one line on stderr of a command that failed as it should."""
    assert result.exit_code == exit_code, (result.stderr, result.exception)
    assert re.fullmatch(r"Error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr


@pytest.fixture
def draw(cli):
    """Runs `dtorch run sd3` with a prompt and more."""
    return lambda *args: cli("run", "sd3", "--prompt", "a cat", *args)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument 'model'"),
        (["run", "sd3"], "Missing option '--prompt'"),
        (["run", "sd33", "--prompt", "x"], "no text-to-image model called 'sd33'; did you mean 'sd3'?"),
        (["run", "sd3", "--prompt", "x", "--quick"], "--quick"),
        (["run", "sd3", "--prompt", "x", "--dtype", "int8"], "bfloat16"),
        (["run", "sd3", "--prompt", "x", "--mode", "cloud"], "inline"),
        (["run", "sd3", "--prompt", "x", "--steps", "0"], "--steps"),
        (["run", "sd3", "--prompt", "x", "--height", "-8"], "--height"),
        (["run", "sd3", "--prompt", "x", "--num-images", "0"], "--num-images"),
        (["run", "sd3", "--prompt", "x", "--guidance", "inf"], "--guidance inf: give a finite number"),
        (["run", "sd3", "--prompt", "x", "--mesh", "dp2"], "--mesh 'dp2'"),
    ],
)
def test_options(cli, args: list[str], text: str) -> None:
    assert text in complaint(cli(*args))


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("cat.txt", "must end in one of .png"),
        ("cat", "must end in one of .png"),
        ("nowhere/cat.png", "there is no folder nowhere"),
        ("folder.png", "folder.png is a folder"),
        ("file.png/cat.png", "there is no folder file.png"),
        ("/proc/cat.png", "cannot write to /proc"),  # refused to every user, root included
    ],
)
def test_out(draw, tmp_path: Path, out: str, text: str) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file.png").touch()
    assert text in complaint(draw("--out", out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.png", "folder.png"]


def test_folder_that_is_not_there(draw) -> None:
    assert "there is no folder nowhere" in complaint(draw("--model", "nowhere"))


def test_folder_without_an_index(draw, model_copy: Path) -> None:
    (model_copy / "model_index.json").unlink()
    assert f"{model_copy} is no diffusers folder: it has no model_index.json" in complaint(draw("--model", model_copy))


@pytest.mark.parametrize("text", ['{"_class_name": "Stab', "[]", "\x00"])
def test_folder_with_a_broken_index(draw, model_copy: Path, text: str) -> None:
    index = model_copy / "model_index.json"
    index.write_text(text)
    assert str(index) in complaint(draw("--model", model_copy))


def test_folder_of_another_pipeline(draw, demo) -> None:
    line = complaint(draw("--model", demo("flux")))
    assert "model_index.json is for FluxPipeline, not StableDiffusion3Pipeline" in line


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_weights_cut_short(draw, model_copy: Path, keep: float) -> None:
    path = model_copy / "transformer" / "diffusion_pytorch_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else int(keep)])
    assert f"{path} is damaged or cut short" in complaint(draw("--model", model_copy))


def test_missing_component(draw, model_copy: Path) -> None:
    (model_copy / "vae").rename(model_copy / "vae-old")
    assert f"{model_copy / 'vae'} is missing" in complaint(draw("--model", model_copy))


def test_missing_shard(draw, model_copy: Path) -> None:
    index = model_copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part-00001-of-00001.safetensors"}}))
    assert f"{index.parent / 'part-00001-of-00001.safetensors'} is missing" in complaint(draw("--model", model_copy))


def test_weights_as_pickle_only_are_not_read(draw, model_copy: Path) -> None:
    path = model_copy / "vae" / "diffusion_pytorch_model.safetensors"
    path.rename(path.with_suffix(".bin"))
    assert f"{path.parent} has no weights in safetensors format" in complaint(draw("--model", model_copy))


def test_weights_that_do_not_fit_the_configuration(draw, model_copy: Path) -> None:
    path = model_copy / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 8}))
    assert f"diffusers cannot load {model_copy}" in complaint(draw("--model", model_copy))


@pytest.mark.parametrize(
    ("model", "args", "text"),
    [
        ("sd3", ["--height", "100"], "height 100 is not a multiple of 16, as the model needs; use 96 or 112"),
        ("sd3", ["--width", "8"], "width 8 is not a multiple of 16, as the model needs; use 16"),
        ("sd3", ["--width", "528"], "width 528 is beyond the model's largest, 512"),
        ("flux", ["--height", "100"], "height 100 is not a multiple of 16, as the model needs; use 96 or 112"),
        ("flux", ["--negative-prompt", "dog", "--guidance", "1"], "no effect at guidance 1"),
    ],
)
def test_requests_the_model_cannot_draw(cli, demo, model: str, args: list[str], text: str) -> None:
    demo(model)
    assert text in complaint(cli("run", model, "--prompt", "a cat", *args))


def test_debug_shows_the_traceback_before_the_line(draw) -> None:
    result = draw("--model", "nowhere", "--debug")
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.splitlines()[-1].startswith("Error: there is no folder nowhere")


def test_a_failure_is_one_line_too_and_says_how_to_see_more(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first line\n  second line.")

    monkeypatch.setattr(run, "run_image_job", fail)
    assert complaint(draw(), 1) == "Error: RuntimeError: first line second line. Add --debug for the traceback.\n"


def test_an_interrupt_ends_with_130(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_image_job", interrupt)
    assert draw().exit_code == 130


def test_cache_that_cannot_be_written(draw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/cache")
    assert "the demo model cannot be written to /proc/cache/dtorch/models" in complaint(draw(), 1)


def test_damaged_demo_says_what_to_remove(draw, model_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model_copy / "model_index.json").unlink()
    monkeypatch.setattr("dtorch.models.cache.demo_folder", lambda _entry: model_copy)
    assert f"remove {model_copy} to build it anew" in complaint(draw(), 1)


@pytest.mark.parametrize(("difference", "allowed", "ok"), [(0.9, 1, True), (3.5, 1, False), (0.1, 0, False)])
def test_check_decides_the_exit_code(
    draw, monkeypatch: pytest.MonkeyPatch, difference: float, allowed: int, ok: bool
) -> None:
    result = image_job.ImageResult(
        images=["sd3.png"], model="sd3", folder="model", prompt="a cat", negative_prompt=None, height=16, width=16,
        steps=1, guidance=1.0, seed=0, dtype="float32", mode="inline", mesh={"dp": 2}, workers=[],
        seconds={"draw": 0.5}, check=Check(difference, allowed, ok),
    )  # fmt: skip
    monkeypatch.setattr(run, "run_image_job", lambda *_: result)
    done = draw()
    assert f"check: largest difference from plain diffusers {difference}/255, allowed {allowed}/255" in done.stdout
    if ok:
        assert done.exit_code == 0
    else:
        assert f"plain diffusers {difference}/255, allowed {allowed}/255" in complaint(done, 1)
