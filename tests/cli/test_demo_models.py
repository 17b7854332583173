"""The demo models: real folders, the same bytes every time, and lively pictures in plain diffusers."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from dtorch.models import MODELS, ModelInputError, get_model
from dtorch.models.cache import cache_folder, demo_folder, recipe_hash
from dtorch.models.demo import Part
from dtorch.models.demo_tokenizers import WORDS, clip_tokenizer, t5_tokenizer
from dtorch.models.images import ImageRequest, draw, largest_difference, load_pipeline


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_names_are_the_keys() -> None:
    assert all(name == entry.name for name, entry in MODELS.items())


def test_unknown_name() -> None:
    with pytest.raises(ModelInputError, match=r"called 'llama'; Choose one of: sd3, flux\."):
        get_model("llama", "text-to-image")


@pytest.mark.parametrize("name", list(MODELS))
def test_same_bytes_in_another_process(demo, tmp_path: Path, name: str) -> None:
    program = (
        f"from dtorch.models.cache import *; print(demo_folder(__import__('dtorch.models').models.MODELS[{name!r}]))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    other = Path(done.stdout.strip())
    assert other.name == demo(name).name
    assert contents(other) == contents(demo(name))
    assert sum(map(len, contents(other).values())) < 10e6
    assert [path.name for path in other.parent.iterdir()] == [other.name]  # nothing left of the building


@pytest.mark.parametrize("name", list(MODELS))
def test_plain_diffusers_loads_it_and_draws(demo, name: str) -> None:
    entry = MODELS[name]
    pipe = load_pipeline(entry, demo(name), "float32")
    assert type(pipe).__name__ == entry.pipeline_name
    request = ImageRequest(prompt="a photo of a cat", steps=4, guidance=4.0, height=64, width=96, num_images=2)
    seen: list[int] = []
    images = draw(entry, pipe, request, on_step=seen.append)
    assert images.shape == (2, 64, 96, 3)
    assert seen == [1, 2, 3, 4]
    for image in images:
        assert ((image > 0.02) & (image < 0.98)).mean() > 0.5  # not clipped to black and white
        assert image.std(axis=(0, 1)).min() > 0.05  # not flat, in any colour
    assert largest_difference(images[:1], images[1:]) > 20  # another seed is another picture
    again = draw(entry, pipe, dataclasses.replace(request, seed=1, num_images=1))
    assert largest_difference(images[1:], again) < 1  # picture 1 of seed 0 is picture 0 of seed 1
    for change in ({"prompt": "a red house"}, {"negative_prompt": "low quality"}, {"guidance": 2.0}):
        other = draw(entry, pipe, dataclasses.replace(request, num_images=1, **change))
        assert largest_difference(images[:1], other) > 2, change


def test_nan_is_an_error(demo) -> None:
    pipe = load_pipeline(MODELS["sd3"], demo("sd3"), "float32")
    pipe.vae.decoder.conv_out.bias.data.fill_(np.nan)
    with pytest.raises(ArithmeticError, match="NaN"):
        draw(MODELS["sd3"], pipe, ImageRequest(prompt="a cat", steps=1, guidance=1.0, height=16, width=16))


@pytest.mark.parametrize("text", ["", "A Cat!", "zebra quagga", "naïve café", "猫と犬 🐱", "<|endoftext|>", "\x00\t\n"])
def test_tokenizers_take_any_text(text: str) -> None:
    clip, t5 = clip_tokenizer(77), t5_tokenizer(512)
    for tokenizer, length in ((clip, 77), (t5, 512)):
        ids = tokenizer(text, padding="max_length", max_length=length, truncation=True).input_ids
        assert len(ids) == length
        assert max(ids) < len(tokenizer)


def test_frequent_words_are_one_token() -> None:
    text = " ".join(WORDS)
    assert clip_tokenizer(77).tokenize(text) == [f"{word}</w>" for word in WORDS]
    assert t5_tokenizer(512).tokenize(text) == [f"▁{word}" for word in WORDS]


def test_recipe_decides_the_folder_name() -> None:
    entry = MODELS["sd3"]
    changed = dataclasses.replace(entry, demo_parts={**entry.demo_parts, "scheduler": Part("x", {"shift": 4.0})})
    assert recipe_hash(entry) == recipe_hash(dataclasses.replace(entry, title="another title"))
    assert recipe_hash(entry) != recipe_hash(changed)


def test_relative_cache_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert cache_folder() == tmp_path / ".cache" / "dtorch" / "models"


def test_two_builders_at_once_share_one_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    both_built = threading.Barrier(2, timeout=20)

    def build(_pipeline: str, _parts: dict[str, Part], folder: Path) -> None:
        (folder / "weights").write_text("the same")
        both_built.wait()

    entry = dataclasses.replace(MODELS["sd3"], build_demo=build)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(demo_folder(entry))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert (folders[0] / "weights").read_text() == "the same"
    assert list(folders[0].parent.iterdir()) == [folders[0]]


def test_failed_build_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def build(_pipeline: str, _parts: dict[str, Part], folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        demo_folder(dataclasses.replace(MODELS["sd3"], build_demo=build))
    assert list(cache_folder().iterdir()) == []
