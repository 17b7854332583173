"""Workers for the time of one command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dtorch.cli.mesh_option import MeshShape
from dtorch.cli.progress import Stages

if TYPE_CHECKING:
    from dtorch.core.mesh import DeviceMesh


@contextmanager
def on_mesh(shape: MeshShape, mode: str, stages: Stages) -> Iterator[DeviceMesh]:
    """Make a new mesh of CPU devices the default one; end the session, and with it the workers, afterwards."""
    import dtorch

    try:
        with stages.stage("start"):
            dtorch.init(mode=mode)
            mesh = dtorch.init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
        with mesh:
            yield mesh
    finally:
        dtorch.shutdown()


@contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Write a profile of the block to a file, and say on the error stream what is in it; or, without a path, nothing."""
    if path is None:
        yield
        return
    import dtorch

    with dtorch.profile(path) as profile:
        yield
    typer.echo(profile.summary(), err=True)
    for advice in profile.advice():
        typer.echo(str(advice), err=True)


def worker_report() -> list[dict[str, Any]]:
    """The workers of the session, as JSON values."""
    import dtorch

    return [
        {"pid": w.pid, "host": w.host, "devices": [str(d) for d in w.devices], "state": str(w.state)}
        for w in dtorch.workers()
    ]
