"""`dtorch plan`: what a layout makes of a model, without loading or running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dtorch.cli.errors import InputError, one_line_errors
from dtorch.cli.mesh_option import parse_mesh

ModelOption = Annotated[Path, typer.Option("--model", help="Folder of a language model; its weights are not read.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences in a call.")]
SequenceOption = Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def plan(
    model: ModelOption,
    mesh: Annotated[str, typer.Option(help="Axes of the mesh of devices, such as dp=2,tp=2.")],
    batch: BatchOption = 8,
    sequence: SequenceOption = 512,
    microbatches: Annotated[int, typer.Option(min=1, help="Parts of a call's batch.")] = 1,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show where a model's parameters would lie, bytes a device, and what each layer would communicate. Runs nothing."""
    with one_line_errors(debug):
        layout = parse_mesh(mesh)
        bare = model_without_weights(model)
        import dtorch

        sizes = dict(zip(layout.names, layout.sizes, strict=True))
        try:
            found = dtorch.forecast(bare, sizes, batch, sequence, microbatches=microbatches)
        except dtorch.PlacementError as error:
            raise InputError(f"--mesh {mesh!r}: {error}") from error
    typer.echo(json.dumps(as_values(found)) if as_json else str(found))


def as_values(found: Any) -> dict[str, Any]:
    """A forecast as JSON values."""
    layers = {
        name: {"collectives": dict(c.collectives), "bytes": c.bytes, "flops": c.flops} for name, c in found.layers.items()
    }
    return {
        "layout": found.layout,
        "microbatches": found.microbatches,
        "seconds": found.seconds,
        "bytes_per_device": found.bytes_per_device,
        "parameter_bytes": {str(device): n for device, n in found.parameters.bytes_by_device.items()},
        "layers": layers,
        "notes": list(found.parameters.notes),
    }


def model_without_weights(folder: Path) -> Any:
    """The causal language model of a folder on the meta device.

    Raises:
        InputError: the folder has no configuration, or one of a model that transformers does not know.
    """
    if not (folder / "config.json").is_file():
        raise InputError(f"--model {folder}: there is no config.json in it; give a folder in transformers format.")
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds here; all mean that the folder cannot be used
        raise InputError(f"transformers cannot make the model of {folder}: {type(error).__name__}: {error}") from error
