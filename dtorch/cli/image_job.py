"""The work of `dtorch run`: load, place on the mesh, draw, write, and compare with plain diffusers."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtorch.cli.demo import usable_demo
from dtorch.cli.mesh_option import MeshShape
from dtorch.cli.output import save_pictures
from dtorch.cli.progress import Stages
from dtorch.cli.session import on_mesh, profiled, worker_report
from dtorch.models import ModelEntry

if TYPE_CHECKING:
    from dtorch.core.mesh import DeviceMesh
    from dtorch.models.images import ImageRequest, Images

Dtype = Literal["float32", "bfloat16", "float16"]
Mode = Literal["inline", "local"]


@dataclass(frozen=True, kw_only=True)
class ImageJob:
    """The options of one run, checked as far as that goes without loading the model.

    None stands for the model's default; for `folder` it means the demo model, for `mode` what the environment says.
    """

    entry: ModelEntry
    folder: Path | None
    shape: MeshShape
    mode: Mode | None
    dtype: Dtype
    paths: list[Path]
    prompt: str
    negative_prompt: str | None
    steps: int | None
    guidance: float | None
    height: int | None
    width: int | None
    seed: int
    check: bool
    profile: Path | None = None


@dataclass(frozen=True)
class Check:
    """How far pictures are from plain diffusers.

    Attributes:
        largest_difference: of any pixel, in steps of 1/255.
        allowed: what is still right. One device computes what plain PyTorch does, to the bit; several may add up
            numbers in another order, and round in between.
        ok: whether the difference is allowed.
    """

    largest_difference: float
    allowed: int
    ok: bool

    def __str__(self) -> str:
        return f"largest difference from plain diffusers {self.largest_difference:.3g}/255, allowed {self.allowed}/255"


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """What a run reports; the fields are those of its JSON."""

    images: list[str]
    model: str
    folder: str
    prompt: str
    negative_prompt: str | None
    height: int
    width: int
    steps: int
    guidance: float
    seed: int
    dtype: str
    mode: str
    mesh: dict[str, int]
    workers: list[dict[str, Any]]
    seconds: dict[str, float]
    check: Check | None

    def summary(self) -> str:
        """The result for people: the files, one line on how they were made, one on the check."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        made = f"{self.width} x {self.height} pixels, {self.steps} steps, seed {self.seed}, {self.dtype}, mesh {mesh}"
        lines = [*self.images, f"{made}: {self.seconds['draw']:.2f} s"]
        return "\n".join(lines if self.check is None else [*lines, f"check: {self.check}"])


def run_image_job(job: ImageJob, stages: Stages) -> ImageResult:
    """Draw on the mesh, write the pictures, and compare them if asked to. Blocks; afterwards no worker is left.

    Raises:
        ModelInputError: the folder or the request does not fit the model; no worker has been started.
        FailureError: the demo model is damaged or cannot be built.
        DtorchError: the mesh could not be started, or drawing on it failed.
    """
    from dtorch.core.config import from_environment

    mode = from_environment(mode=job.mode).mode
    _quiet_libraries()
    from dtorch.models.folder import check_folder
    from dtorch.models.images import draw, to_pil

    folder = job.folder or usable_demo(job.entry, stages, lambda demo: check_folder(demo, job.entry.pipeline_name))
    with stages.stage("load"):
        pipe, request = _load(job, folder)
    with on_mesh(job.shape, mode, stages) as mesh, profiled(job.profile):
        with stages.stage("place"):
            _place(pipe, mesh)
        with stages.stage("draw", total=request.steps):
            images = draw(job.entry, pipe, request, on_step=stages.advance_to)
        workers = worker_report()
    save_pictures(to_pil(pipe, images), job.paths)
    del pipe  # a large model must not be in memory twice during the check
    check = None
    if job.check:
        with stages.stage("check", total=request.steps):
            check = _compare(job, folder, images, stages)
    return ImageResult(
        images=[str(path) for path in job.paths],
        model=job.entry.name,
        folder=str(folder),
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        height=request.height,
        width=request.width,
        steps=request.steps,
        guidance=request.guidance,
        seed=request.seed,
        dtype=job.dtype,
        mode=mode,
        mesh=dict(zip(job.shape.names, job.shape.sizes, strict=True)),
        workers=workers,
        seconds={name: round(seconds, 3) for name, seconds in stages.seconds.items()},
        check=check,
    )


def _quiet_libraries() -> None:
    """Keep the loading bars and notices of the libraries out of the user's sight; their warnings stay."""
    import transformers.utils.logging

    # On import, transformers says which image processors it replaces; no pipeline here uses one.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    import diffusers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)


def _load(job: ImageJob, folder: Path) -> tuple[Any, ImageRequest]:
    """The pipeline on the CPU, and the request with every default filled in and checked against it."""
    from dtorch.models.images import ImageRequest, check_request, default_size, load_pipeline

    pipe = load_pipeline(job.entry, folder, job.dtype)
    sampling = job.entry.demo_sampling if job.folder is None else job.entry.sampling
    size = sampling.size or default_size(pipe)
    request = ImageRequest(
        prompt=job.prompt,
        negative_prompt=job.negative_prompt,
        steps=sampling.steps if job.steps is None else job.steps,
        guidance=sampling.guidance if job.guidance is None else job.guidance,
        height=job.height or size,
        width=job.width or size,
        seed=job.seed,
        num_images=len(job.paths),
    )
    check_request(pipe, request)
    return pipe, request


def _place(pipe: Any, mesh: DeviceMesh) -> None:
    """Cut the transformer, and with it the pictures and passes of a step, along the mesh's axes, and the image that the
    autoencoder decodes; keep the rest whole.

    Raises:
        PlacementError: an axis of an unknown kind, or more pipeline stages than the transformer has layers.
    """
    import torch

    import dtorch
    from dtorch.parallel.inputs import map_tensors, on_mesh

    transformer = dtorch.parallelize(pipe.transformer, mesh)
    # Pipeline stages lie on parts of the mesh; the pipeline goes on where it keeps its latents.
    transformer.register_forward_hook(lambda _module, _args, out: map_tensors(out, lambda t: on_mesh(t, mesh)))
    for part in pipe.components.values():
        if part is pipe.vae:
            dtorch.parallelize(part, mesh)
        elif isinstance(part, torch.nn.Module) and part is not transformer:
            part.to("dtorch")


def _compare(job: ImageJob, folder: Path, images: Images, stages: Stages) -> Check:
    """Draw the same with plain diffusers on the CPU of this process, from the same folder loaded again."""
    import torch

    from dtorch.models.images import draw, largest_difference
    from dtorch.models.weights import copy_out_of_files

    pipe, request = _load(job, folder)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            copy_out_of_files(part)
    difference = largest_difference(images, draw(job.entry, pipe, request, on_step=stages.advance_to))
    allowed = _allowed(job)
    return Check(difference, allowed, ok=difference <= allowed)


def _allowed(job: ImageJob) -> int:
    """Difference in steps of 1/255 that other orders of adding explain."""
    if job.shape.num_devices == 1:
        return 0
    if all(name.startswith("dp") or size == 1 for name, size in zip(job.shape.names, job.shape.sizes, strict=True)):
        return 1
    # A sum over devices adds what each has rounded to the type of the weights.
    return {"float32": 2, "float16": 4, "bfloat16": 16}[job.dtype]
