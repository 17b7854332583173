"""Drawing pictures with an unmodified diffusers pipeline, on whatever device it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .demo import import_class
from .errors import ModelInputError
from .folder import check_folder
from .registry import ModelEntry

Images = npt.NDArray[np.float32]  # (count, height, width, 3), values from 0 to 1


@dataclass(frozen=True, kw_only=True)
class ImageRequest:
    """What to draw. Picture number i starts from noise of its own generator, seeded with `seed + i`.

    Attributes:
        height, width: pixels.
    """

    prompt: str
    negative_prompt: str | None = None
    steps: int
    guidance: float
    height: int
    width: int
    seed: int = 0
    num_images: int = 1


def load_pipeline(entry: ModelEntry, folder: Path, dtype: str) -> Any:
    """The pipeline in `folder`, on the CPU, with weights of type `dtype` ("float32", "bfloat16" or "float16").

    Reads safetensors files only and never the network.

    Raises:
        ModelInputError: the folder is not a whole model of this entry, or diffusers refuses it.
    """
    check_folder(folder, entry.pipeline_name)
    pipeline_class = import_class(entry.pipeline)
    try:
        pipe = pipeline_class.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # libraries raise many kinds here; all mean that the folder cannot be used
        raise ModelInputError(f"diffusers cannot load {folder}: {type(error).__name__}: {error}") from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def default_size(pipe: Any) -> int:
    """Height and width in pixels that the pipeline draws when it is not told."""
    return int(pipe.default_sample_size * pipe.vae_scale_factor)


def check_request(pipe: Any, request: ImageRequest) -> None:
    """Refuse what the pipeline would refuse midway or change in silence.

    Raises:
        ModelInputError: a height or width that the pipeline cannot draw, or a negative prompt without effect.
    """
    config = pipe.transformer.config
    multiple = pipe.image_processor.config.vae_scale_factor * config.patch_size  # pixels along the side of one token
    limit = getattr(config, "pos_embed_max_size", None)  # tokens along one side, where positions come from a table
    for name, value in (("height", request.height), ("width", request.width)):
        if value % multiple:
            lower = value // multiple * multiple
            near = f"{lower} or {lower + multiple}" if lower else f"{multiple}"
            raise ModelInputError(f"{name} {value} is not a multiple of {multiple}, as the model needs; use {near}.")
        if limit is not None and value > limit * multiple:
            raise ModelInputError(f"{name} {value} is beyond the model's largest, {limit * multiple}; use less.")
    if request.negative_prompt and request.guidance <= 1:
        raise ModelInputError(
            f"a negative prompt has no effect at guidance {request.guidance:g}; use a guidance above 1."
        )


def draw(entry: ModelEntry, pipe: Any, request: ImageRequest, on_step: Callable[[int], None] | None = None) -> Images:
    """Run the pipeline where it stands. Blocks until the pictures are here.

    Args:
        on_step: called with the number of denoising steps issued so far.

    Returns:
        The pictures, (num_images, height, width, 3), float32 from 0 to 1.

    Raises:
        ArithmeticError: the pictures hold NaN.
    """
    arguments: dict[str, Any] = {"guidance_scale": request.guidance}
    if request.negative_prompt:
        arguments |= {"negative_prompt": request.negative_prompt, entry.negative_scale: request.guidance}

    def after_step(_pipe: Any, step: int, _time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(step + 1)
        return tensors

    images: Images = pipe(
        prompt=request.prompt,
        height=request.height,
        width=request.width,
        num_inference_steps=request.steps,
        num_images_per_prompt=request.num_images,
        generator=[torch.Generator().manual_seed(request.seed + i) for i in range(request.num_images)],
        callback_on_step_end=after_step,
        callback_on_step_end_tensor_inputs=[],
        output_type="np",
        **arguments,
    ).images
    if np.isnan(images).any():
        raise ArithmeticError("the picture holds NaN; a wider --dtype (float32) may help.")
    return images


def largest_difference(left: Images, right: Images) -> float:
    """The largest difference between two equal-shaped sets of pictures, in steps of 1/255."""
    return float(np.abs(left.astype(np.float64) - right).max()) * 255


def to_pil(pipe: Any, images: Images) -> list[Any]:
    """The pictures as `PIL.Image.Image`, rounded as diffusers does it."""
    pictures: list[Any] = pipe.image_processor.numpy_to_pil(images)
    return pictures
