"""`DiffusionPipeline.from_pretrained` into a mesh: every component is there, and the pictures are plain torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

import dtorch
from benchmarks.diffusers_cases.images import SQUARE, flux, images, sd3
from benchmarks.diffusers_cases.pieces import PROMPT
from benchmarks.diffusers_cases.registry import Results
from dtorch import patches
from dtorch.models.weights import copy_out_of_files

PIPELINES: dict[str, Callable[[], Any]] = {"sd3": sd3, "flux": flux}


@pytest.fixture(scope="module", params=PIPELINES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline."""
    folder = tmp_path_factory.mktemp(request.param)
    PIPELINES[request.param]().save_pretrained(folder)
    return folder


@pytest.fixture
def patched() -> Iterator[None]:
    patches.apply()
    yield
    patches.revert()


def load(folder: Path, **options: Any) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any) -> Results:
    return images(pipe, prompt=PROMPT, **SQUARE)


def plain(folder: Path, **options: Any) -> Results:
    """What plain torch draws; its weights are in memory, since their address decides how some kernels round."""
    pipe = load(folder, **options)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            copy_out_of_files(part)
    return draw(pipe)


def placed(pipe: Any) -> dict[torch.device, int]:
    """How many parameters and buffers are where."""
    counts: dict[torch.device, int] = {}
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            for t in (*part.parameters(), *part.buffers()):
                counts[t.device] = counts.get(t.device, 0) + 1
    return counts


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("reads", ["inline", "local"], indirect=True)
@pytest.mark.parametrize("device_map", ["dtorch", "balanced"])
def test_pictures_are_those_of_plain_torch(device_map: str, saved: Path, reads: Callable[[], int]) -> None:
    before = reads()
    pipe = load(saved, device_map=device_map)
    assert set(placed(pipe)) == {torch.device("dtorch", dtorch.zeros(1).device.index)}
    assert reads() == before, "loading reads nothing back"
    assert torch.equal(draw(pipe)[0], plain(saved)[0])


def test_by_name_needs_no_patch(saved: Path, reads: Callable[[], int]) -> None:
    assert not any(patch.applied for patch in patches.available())
    pipe = load(saved, device_map="dtorch")
    assert {device.type for device in placed(pipe)} == {"dtorch"}
    assert torch.equal(draw(pipe)[0], plain(saved)[0])


@pytest.mark.usefixtures("patched")
def test_bfloat16(saved: Path, reads: Callable[[], int]) -> None:
    pipe = load(saved, device_map="balanced", torch_dtype=torch.bfloat16)
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.bfloat16}
    assert torch.equal(draw(pipe)[0], plain(saved, torch_dtype=torch.bfloat16)[0])


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("device_map", ["dtorch", "balanced"])
def test_into_the_mesh_that_is_the_default_one(device_map: str, saved: Path, reads: Callable[[], int]) -> None:
    want = plain(saved)[0]
    with dtorch.DeviceMesh("cpu", [0, 1]) as mesh:
        pipe = load(saved, device_map=device_map)
        assert {p.device_mesh for p in pipe.transformer.parameters()} == {mesh}
        assert {p.device_mesh for p in pipe.text_encoder.parameters()} == {mesh}
        assert torch.equal(draw(pipe)[0], want)


@pytest.mark.usefixtures("patched")
def test_pieces_into_one_pipeline(saved: Path, reads: Callable[[], int]) -> None:
    """A component that is on the mesh already joins those that are loaded to it."""
    pipe = load(saved, device_map="dtorch")
    again = load(saved, transformer=pipe.transformer, device_map="dtorch")
    assert again.transformer is pipe.transformer
    assert len(placed(again)) == 1
    assert torch.equal(draw(again)[0], draw(pipe)[0])
