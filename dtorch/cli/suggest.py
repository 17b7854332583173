"""`dtorch suggest`: layouts of a model by predicted time."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from dtorch.cli.errors import one_line_errors
from dtorch.cli.plan import (
    BatchOption,
    DebugOption,
    JsonOption,
    ModelOption,
    SequenceOption,
    as_values,
    model_without_weights,
)


def suggest(
    model: ModelOption,
    devices: Annotated[int, typer.Option(min=1, max=64, help="Number of devices.")],
    batch: BatchOption = 8,
    sequence: SequenceOption = 512,
    memory: Annotated[float | None, typer.Option(min=0, help="GiB of a device; by default without limit.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many layouts to show.")] = 5,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Rank layouts of a model on so many devices, with reasons. Runs nothing; measure first with `dtorch bench-links`."""
    with one_line_errors(debug):
        bare = model_without_weights(model)
        import dtorch
        from dtorch.parallel.links import Links, links_file

        links = Links.load(links_file())
        limit = None if memory is None else int(memory * 2**30)
        found = dtorch.suggest(bare, devices, batch, sequence, limit, links=links)[:top]
    if as_json:
        values = [{**as_values(s.forecast), "fits": s.fits, "reason": s.reason} for s in found]
        typer.echo(json.dumps({"links": links.measured, "layouts": values}))
        return
    typer.echo(f"speeds: {links.measured}")
    for place, suggestion in enumerate(found, 1):
        typer.echo(f"{place}. {suggestion}")
