"""Pictures drawn on several devices: close to plain diffusers, and no more communication than the layout needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from benchmarks.diffusers_cases.images import flux, images, sd3
from benchmarks.diffusers_cases.pieces import PROMPT, SIZE
from dtorch.cli.image_job import ImageJob, run_image_job
from dtorch.cli.mesh_option import parse_mesh
from dtorch.cli.progress import Stages
from dtorch.models import get_model

STEPS = 3
CALL: dict[str, Any] = {"prompt": PROMPT, "height": SIZE, "width": SIZE, "max_sequence_length": 12}


@pytest.mark.parametrize(
    ("model", "mesh", "allowed"),
    [
        ("sd3", "dp=2", 1),
        ("sd3", "dp=3", 1),
        ("sd3", "tp=2", 2),
        ("sd3", "pp=2", 2),
        ("sd3", "dp=2,tp=2", 2),
        ("flux", "dp=2", 1),
        ("flux", "tp=2", 2),
        ("flux", "dp=2,tp=2", 2),
        ("flux", "dp=1", 0),
    ],
)
def test_run_places_by_the_mesh(model: str, mesh: str, allowed: int, tmp_path: Path) -> None:
    job = ImageJob(
        entry=get_model(model, "text-to-image"),
        folder=None,
        shape=parse_mesh(mesh),
        mode="inline",
        dtype="float32",
        paths=[tmp_path / "0.png", tmp_path / "1.png"],
        prompt="a cat by the sea",
        negative_prompt=None,
        steps=2,
        guidance=None,
        height=32,
        width=32,
        seed=0,
        check=True,
    )
    with Stages() as stages:
        result = run_image_job(job, stages)
    assert result.check is not None
    assert result.check.ok, result.check
    assert result.check.allowed == allowed


def drawn(pipe: Any, axis: str, **arguments: Any) -> tuple[Counter[tuple[str, str]], torch.Tensor]:
    """Communication by kind and operator while a pipeline draws on two devices, and the pictures."""
    with dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)) as mesh:
        dtorch.parallelize(pipe.transformer, mesh)
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module) and part is not pipe.transformer:
                part.to("dtorch")
        report = dtorch.explain(lambda: images(pipe, **CALL, **arguments)[0], quiet=True)
    found = Counter((m.kind, line.op) for line in report.lines for m in line.moves if m.bytes)
    return found, report.result


def test_sd3_batch(reads: Callable[[], int]) -> None:
    """The passes with and without prompt are one batch: they meet once in each step, where guidance adds them."""
    found, pictures = drawn(sd3(), "dp", guidance_scale=5.0)
    torch.testing.assert_close(pictures, images(sd3(), **CALL, guidance_scale=5.0)[0], rtol=0, atol=1 / 255)
    assert found == {("all_gather", "aten.split.Tensor"): STEPS}


def test_flux_batch(reads: Callable[[], int]) -> None:
    """Two pictures never meet."""
    found, pictures = drawn(flux(), "dp", num_images_per_prompt=2)
    torch.testing.assert_close(pictures, images(flux(), **CALL, num_images_per_prompt=2)[0], rtol=0, atol=1 / 255)
    assert not found


def test_one_picture_is_not_cut(reads: Callable[[], int]) -> None:
    found, pictures = drawn(flux(), "dp")
    assert torch.equal(pictures, images(flux(), **CALL)[0])
    assert not found


def test_sd3_tensor_parallel(reads: Callable[[], int]) -> None:
    """Each half of a block ends in one sum for each of its streams; nothing is gathered."""
    found, pictures = drawn(sd3(), "tp", guidance_scale=5.0)
    torch.testing.assert_close(pictures, images(sd3(), **CALL, guidance_scale=5.0)[0], rtol=0, atol=2 / 255)
    assert set(found) == {("all_reduce", "redistribute")}
    blocks = 2 + 2 + 1 + 1  # the second block of two drops the text stream
    around = 1 + 1  # the embedding of time and text, the output
    assert found.total() == STEPS * (blocks + around)
