"""The work of `dtorch generate`: load, place on the mesh, continue, and compare with plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtorch.cli.demo import usable_demo
from dtorch.cli.errors import InputError
from dtorch.cli.image_job import Dtype, Mode
from dtorch.cli.mesh_option import MeshShape
from dtorch.cli.progress import Stages
from dtorch.cli.session import on_mesh, worker_report
from dtorch.models import DEMO_TEXT_MODEL

if TYPE_CHECKING:
    import torch

    from dtorch.models.text import Continuation, TextRequest

_DEFAULT_NEW_TOKENS = 100


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """The options of `dtorch generate` that say how it runs.

    Attributes:
        folder: None stands for the demo model.
        mode: None stands for what the environment says.
        max_new_tokens: None stands for the default, or less where the model takes less.
    """

    folder: Path | None
    shape: MeshShape
    mode: Mode | None
    dtype: Dtype
    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """What a run reports; the fields are those of its JSON.

    Attributes:
        finish: "end" when the model ended the text, "length" when it was cut off.
        seconds: of each stage, until the first token was here, and of the whole text.
        check: whether plain transformers gives the same tokens; None when that was not asked.
    """

    text: str
    tokens: list[int]
    finish: str
    prompt: str
    num_prompt_tokens: int
    folder: str
    dtype: str
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    mode: str
    mesh: dict[str, int]
    workers: list[dict[str, Any]]
    seconds: dict[str, float]
    tokens_per_second: float
    check: bool | None = None

    def summary(self) -> str:
        """One line for people on how the text was made."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        return (
            f"{len(self.tokens)} tokens, {self.tokens_per_second:.1f} a second, the first after "
            f"{self.seconds['first token']:.2f} s; {self.dtype}, mesh {mesh}"
        )


class PlacedModel:
    """A causal language model on a mesh, for as long as the block of `placed` lasts."""

    def __init__(self, job: TextJob, folder: Path, mode: str, model: Any, tokenizer: Any, stages: Stages) -> None:
        self.job, self.folder, self.mode, self.stages = job, folder, mode, stages
        self.model, self.tokenizer = model, tokenizer

    def request(self, ids: torch.Tensor) -> TextRequest:
        """How to continue a prompt, with every default filled in.

        Raises:
            ModelInputError: the prompt leaves no room.
            InputError: it leaves less than was asked for.
        """
        return _request(self.job, self.model, ids)

    def continue_text(self, ids: torch.Tensor, request: TextRequest, on_text: Callable[[str], None]) -> Continuation:
        """Continue a prompt; see `dtorch.models.text.continue_text`."""
        from dtorch.models.text import continue_text

        return continue_text(self.model, self.tokenizer, ids, request, on_text)

    def report(self, prompt: str, ids: torch.Tensor, request: TextRequest, made: Continuation) -> TextResult:
        """What was made, as a result without a check."""
        job, total = self.job, made.total_s
        seconds = {**self.stages.seconds, "first token": made.first_s, "generate": total}
        return TextResult(
            text=made.text,
            tokens=made.tokens,
            finish="length" if len(made.tokens) == request.max_new_tokens else "end",
            prompt=prompt,
            num_prompt_tokens=ids.shape[1],
            folder=str(self.folder),
            dtype=job.dtype,
            temperature=job.temperature,
            top_k=job.top_k,
            top_p=job.top_p,
            seed=job.seed,
            mode=self.mode,
            mesh=dict(zip(job.shape.names, job.shape.sizes, strict=True)),
            workers=worker_report(),
            seconds={name: round(value, 3) for name, value in seconds.items()},
            tokens_per_second=round(len(made.tokens) / total, 2),
        )


@contextmanager
def placed(job: TextJob, stages: Stages) -> Iterator[PlacedModel]:
    """Load the model and put it on its mesh; afterwards no worker is left.

    Raises:
        ModelInputError: the folder does not hold a model; no worker has been started.
        FailureError: the demo model is damaged or cannot be built.
        DtorchError: the mesh could not be started, or the model cannot be cut along it.
    """
    import dtorch
    from dtorch.core.config import from_environment

    mode = from_environment(mode=job.mode).mode
    with stages.stage("import"):
        _quiet_library()
        from dtorch.models.folder import check_text_folder
        from dtorch.models.text import load_text_model
    folder = job.folder or usable_demo(DEMO_TEXT_MODEL, stages, check_text_folder)
    with stages.stage("load"):
        model, tokenizer = load_text_model(folder, job.dtype)
    with on_mesh(job.shape, mode, stages) as mesh:
        with stages.stage("place"):
            model = model.to("dtorch") if job.shape.num_devices == 1 else dtorch.parallelize(model, mesh)
            dtorch.synchronize()
        yield PlacedModel(job, folder, mode, model, tokenizer, stages)


def check_tokens(job: TextJob, result: TextResult, stages: Stages) -> TextResult:
    """The result with a check: plain transformers on the CPU of this process continues the same prompt."""
    from dtorch.models.text import continue_text, encode, load_text_model
    from dtorch.models.weights import copy_out_of_files

    with stages.stage("check"):
        model, tokenizer = load_text_model(Path(result.folder), job.dtype)
        copy_out_of_files(model)
        ids = encode(tokenizer, result.prompt)
        plain = continue_text(model, tokenizer, ids, _request(job, model, ids))
    return replace(result, check=plain.tokens == result.tokens)


def _request(job: TextJob, model: Any, ids: torch.Tensor) -> TextRequest:
    from dtorch.models.text import TextRequest, room

    num_tokens, left = ids.shape[1], room(model, ids.shape[1])
    wanted = job.max_new_tokens
    if left is not None and wanted is not None and wanted > left:
        raise InputError(
            f"--max-new-tokens {wanted}: the prompt has {num_tokens} tokens, which leaves {left} of those that the model "
            "takes; use at most so many."
        )
    return TextRequest(
        max_new_tokens=wanted or min(_DEFAULT_NEW_TOKENS, left or _DEFAULT_NEW_TOKENS),
        temperature=job.temperature,
        top_k=job.top_k,
        top_p=job.top_p,
        seed=job.seed,
    )


def _quiet_library() -> None:
    """Keep the loading bars and notices of transformers out of the user's sight; warnings of Python stay."""
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
