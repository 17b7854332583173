"""One entry per model that dtorch knows by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import demo_text, flux, llama_demo, sd3
from .demo import Part, build_pipeline_folder
from .errors import ModelInputError

Task = Literal["text-to-image", "text-generation"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How pictures are drawn when the user does not say.

    Attributes:
        steps: number of denoising steps.
        guidance: guidance scale.
        size: height and width in pixels; None leaves them to the pipeline of the folder.
    """

    steps: int
    guidance: float
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class DemoEntry:
    """A model: the class that runs it, and a small random model of the same architecture.

    Attributes:
        name: what the user types.
        title: the name for people.
        task: what it does; a command runs the entries of its own task.
        pipeline: import path of the class that loads and runs a folder of this model.
        demo_parts: the demo model, component name to recipe. Plain data: it is hashed to name the cached folder.
        build_demo: writes the demo model to an empty folder, the same bytes every time.
    """

    name: str
    title: str
    task: Task
    pipeline: str
    demo_parts: dict[str, Part]
    build_demo: Callable[[str, dict[str, Part], Path], None]

    @property
    def pipeline_name(self) -> str:
        """The pipeline's class name, as the folder's own files give it."""
        return self.pipeline.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class ModelEntry(DemoEntry):
    """A model that draws pictures.

    Attributes:
        sampling: defaults for a folder that the user names.
        negative_scale: the argument of the pipeline's call that must exceed 1 for a negative prompt to count.
        demo_sampling: defaults for the demo model.
    """

    sampling: Sampling
    negative_scale: str
    demo_sampling: Sampling
    build_demo: Callable[[str, dict[str, Part], Path], None] = build_pipeline_folder


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry(
            name="sd3",
            title="Stable Diffusion 3",
            task="text-to-image",
            pipeline="diffusers.StableDiffusion3Pipeline",
            sampling=Sampling(steps=28, guidance=7.0),
            negative_scale="guidance_scale",
            demo_parts=sd3.DEMO_PARTS,
            demo_sampling=Sampling(steps=6, guidance=5.0, size=128),
        ),
        ModelEntry(
            name="flux",
            title="FLUX.1",
            task="text-to-image",
            pipeline="diffusers.FluxPipeline",
            sampling=Sampling(steps=28, guidance=3.5),
            negative_scale="true_cfg_scale",
            demo_parts=flux.DEMO_PARTS,
            demo_sampling=Sampling(steps=6, guidance=3.5, size=128),
        ),
    )
}

# Any folder of transformers with a causal language model runs; this is the one to try without a folder.
DEMO_TEXT_MODEL = DemoEntry(
    name="llama",
    title="Llama",
    task="text-generation",
    pipeline="transformers.LlamaForCausalLM",
    demo_parts=llama_demo.DEMO_PARTS,
    build_demo=demo_text.build_text_folder,
)


def get_model(name: str, task: Task) -> ModelEntry:
    """The entry called `name`.

    Raises:
        ModelInputError: no model of this task has the name; the text lists those that there are.
    """
    entry = MODELS.get(name)
    if entry is not None and entry.task == task:
        return entry
    known = [e.name for e in MODELS.values() if e.task == task]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ModelInputError(f"there is no {task} model called {name!r}; {hint}Choose one of: {', '.join(known)}.")
