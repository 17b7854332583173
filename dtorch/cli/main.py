"""The command group. A new command is one module with one function, added here."""

from __future__ import annotations

from typing import Annotated

import typer

import dtorch
from dtorch.cli.bench_links import bench_links
from dtorch.cli.cluster import controller, keys, token, worker
from dtorch.cli.errors import OneLineGroup
from dtorch.cli.exec import exec_
from dtorch.cli.generate import generate
from dtorch.cli.info import info
from dtorch.cli.models import models
from dtorch.cli.plan import plan
from dtorch.cli.run import run
from dtorch.cli.suggest import suggest

app = typer.Typer(name="dtorch", cls=OneLineGroup, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dtorch {dtorch.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def group(
    context: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run one ordinary PyTorch program on many devices."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(run)
app.command()(generate)
app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)
app.command()(plan)
app.command()(suggest)
app.command("bench-links")(bench_links)
app.command()(keys)
app.command()(token)
app.command()(controller)
app.command()(worker)
app.command()(info)
app.command()(models)


def main() -> None:
    """Entry point of the `dtorch` program; ends the process with the command's exit code."""
    app(prog_name="dtorch")
