"""`dtorch exec`: run a script written for one CUDA device on a mesh, without edits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from dtorch.cli.errors import InputError, one_line_errors
from dtorch.cli.image_job import Mode
from dtorch.cli.mesh_option import MeshShape, parse_mesh
from dtorch.cli.session import profiled


def exec_(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="File, or with -m module, to run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script itself is given.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as in python -m.")] = False,
    mesh: Annotated[
        str | None, typer.Option(help="Axes of the mesh that stands for the CUDA device, such as dp=2.")
    ] = None,
    mode: Annotated[Mode | None, typer.Option(help="Workers in this process, or as child processes.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="File for a timeline of client and workers, which Perfetto opens.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Keep dtorch's own lines in tracebacks.")] = False,
) -> None:
    """Run a script written for one CUDA device on a mesh of devices.

    What the script calls "cuda" is the mesh. Options of dtorch come before SCRIPT; all that follows is the script's.
    """
    with one_line_errors(debug):
        shape = None if mesh is None else parse_mesh(mesh)
        if not module and not Path(target).is_file():
            raise InputError(f"there is no file {target}; to run a module, put -m before its name.")
        place = _prepare(shape, mode)
    from dtorch.cli.main_program import run_main_program

    with place, profiled(profile):
        run_main_program(target, arguments or [], as_module=module, keep_frames=debug)


def _prepare(shape: MeshShape | None, mode: Mode | None) -> contextlib.AbstractContextManager[object]:
    """Put the patches in force; returns the mesh to enter, which starts no worker before its first use."""
    import dtorch.api  # makes the device known to torch
    from dtorch import patches

    patches.apply_for_cuda_programs()
    if mode is not None:
        dtorch.init(mode=mode)
    if shape is None:
        return contextlib.nullcontext()
    mesh: contextlib.AbstractContextManager[object] = dtorch.init_device_mesh(
        "cpu", shape.sizes, mesh_dim_names=shape.names
    )
    return mesh
