"""`dtorch run`: draw pictures from text with an unmodified diffusers pipeline on a mesh of devices."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated

import typer

from dtorch.cli.errors import FailureError, InputError, one_line_errors
from dtorch.cli.image_job import Dtype, ImageJob, Mode, run_image_job
from dtorch.cli.mesh_option import parse_mesh
from dtorch.cli.output import output_paths
from dtorch.cli.progress import Stages
from dtorch.models import MODELS, get_model


def _complete_model(incomplete: str) -> list[str]:
    return [name for name in MODELS if name.startswith(incomplete)]


def run(
    model: Annotated[
        str, typer.Argument(help="Name of the model; `dtorch models` lists them.", autocompletion=_complete_model)
    ],
    prompt: Annotated[str, typer.Option(help="What to draw.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to write; several are numbered.", show_default="MODEL.png")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--model", help="Folder in diffusers format.", show_default="a small random demo model"),
    ] = None,
    mesh: Annotated[str, typer.Option(help="Axes of the mesh of devices, such as dp=2,tp=2.")] = "dp=2",
    mode: Annotated[Mode | None, typer.Option(help="Workers in this process, or as child processes.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What not to draw.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance: Annotated[float | None, typer.Option(min=0, help="Guidance scale.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Height in pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width in pixels.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed; picture number i has seed + i.")] = 0,
    num_images: Annotated[int, typer.Option(min=1, help="How many pictures.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = "float32",
    check: Annotated[
        bool, typer.Option("--check", help="Also draw with plain diffusers in this process, and compare the pixels.")
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="File for a timeline of client and workers, which Perfetto opens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Draw pictures from text on a mesh of devices.

    The pipeline is diffusers' own. The mesh's axes cut its transformer: dp the pictures and the passes with and without
    prompt, tp the layers, pp the list of blocks; text encoders and VAE are whole on every device.
    """
    with one_line_errors(debug):
        if guidance is not None and not math.isfinite(guidance):
            raise InputError(f"--guidance {guidance}: give a finite number.")
        job = ImageJob(
            entry=get_model(model, "text-to-image"),
            folder=folder,
            shape=parse_mesh(mesh),
            mode=mode,
            dtype=dtype,
            paths=output_paths(out or Path(f"{model}.png"), num_images),
            prompt=prompt,
            negative_prompt=negative_prompt,
            steps=steps,
            guidance=guidance,
            height=height,
            width=width,
            seed=seed,
            check=check,
            profile=profile,
        )
        with Stages() as stages:
            result = run_image_job(job, stages)
        typer.echo(json.dumps(dataclasses.asdict(result)) if as_json else result.summary())
        if result.check is not None and not result.check.ok:
            raise FailureError(f"{result.check}; the pictures are written all the same.")
