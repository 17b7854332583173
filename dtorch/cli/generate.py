"""`dtorch generate`: continue text, or talk, with an unmodified language model of transformers on a mesh of devices."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtorch.cli.errors import FailureError, InputError, one_line_errors
from dtorch.cli.image_job import Dtype, Mode
from dtorch.cli.mesh_option import parse_mesh
from dtorch.cli.progress import Stages
from dtorch.cli.text_job import PlacedModel, TextJob, TextResult, check_tokens, placed


def generate(
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to continue; with --chat the first turn.", show_default="needed without --chat"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--model", help="Folder in transformers format.", show_default="a small random demo model"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk: read turns from the terminal until it ends.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to add.", show_default="100, or what the model takes")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 takes the likeliest token; above, tokens are drawn, more freely the higher.")
    ] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among so many of the likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Draw among the likeliest that together have this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draw.")] = 0,
    mesh: Annotated[str, typer.Option(help="Axes of the mesh of devices, such as tp=2.")] = "tp=1",
    mode: Annotated[Mode | None, typer.Option(help="Workers in this process, or as child processes.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the weights.")] = "float32",
    check: Annotated[
        bool, typer.Option("--check", help="Also continue with plain transformers in this process, and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, when it is whole.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Continue text with a language model on a mesh of devices, printed as it is made.

    The model is transformers' own. On several devices it is cut along the axes of the mesh.
    """
    with one_line_errors(debug):
        if (top_k is not None or top_p is not None) and temperature == 0:
            raise InputError("--top-k and --top-p say how tokens are drawn; add a --temperature above 0.")
        if chat and (check or as_json):
            raise InputError("--chat goes with neither --check nor --json; leave them out.")
        if prompt is None and not chat:
            raise InputError("there is nothing to continue; give a --prompt, or --chat to talk.")
        job = TextJob(
            folder=folder,
            shape=parse_mesh(mesh),
            mode=mode,
            dtype=dtype,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        if chat:
            _talk(job, prompt)
        else:
            assert prompt is not None, "checked above"
            _continue(job, prompt, check, as_json)


def _continue(job: TextJob, prompt: str, check: bool, as_json: bool) -> None:
    with Stages() as stages:
        with placed(job, stages) as model:
            from dtorch.models.text import encode

            ids = encode(model.tokenizer, prompt)
            request = model.request(ids)
            stages.pause()
            made = model.continue_text(ids, request, _ignore if as_json else _show)
            if not as_json:
                typer.echo()  # what is shown next may clear its line
            result = model.report(prompt, ids, request, made)
        if check:
            result = check_tokens(job, result, stages)
    _print(result, as_json)
    if result.check is False:
        raise FailureError(_difference(job))


def _print(result: TextResult, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    typer.echo(result.summary(), err=True)
    if result.check:
        typer.echo("check: plain transformers gives the same tokens", err=True)


def _difference(job: TextJob) -> str:
    text = "plain transformers gives other tokens"
    if job.shape.num_devices == 1:
        return f"{text}, and one device should give the same; please report it."
    return f"{text}; several devices add in another order, which --dtype float32 makes rarer and one device avoids."


def _talk(job: TextJob, first: str | None) -> None:
    with Stages() as stages, placed(job, stages) as model:
        stages.pause()
        turns: list[dict[str, str]] = []
        while (text := _read_turn() if first is None else first) is not None:
            first = None
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": _answer(model, turns)})


def _answer(model: PlacedModel, turns: list[dict[str, str]]) -> str:
    from dtorch.models.text import encode_chat

    ids = encode_chat(model.tokenizer, turns)
    made = model.continue_text(ids, model.request(ids), _show)
    typer.echo()
    answer: str = made.text
    return answer


def _read_turn() -> str | None:
    """The user's next turn; None at the end of the input."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    while line := sys.stdin.readline():
        if line.strip():
            return line.strip()
    return None


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """For text that is printed when it is whole."""
