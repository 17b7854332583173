"""`dtorch bench-links`: measure what `dtorch suggest` predicts with."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dtorch.cli.errors import one_line_errors
from dtorch.cli.plan import DebugOption, JsonOption


def bench_links(
    devices: Annotated[int, typer.Option(min=2, max=64, help="Number of devices.")] = 2,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="links.json in the user's cache")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure computing and communication of devices, and keep the result for `dtorch suggest`."""
    with one_line_errors(debug):
        import dtorch
        from dtorch.parallel.links import links_file, measure

        dtorch.init()
        try:
            links = measure(devices)
        finally:
            dtorch.shutdown()
        path = out or links_file()
        links.save(path)
    if as_json:
        typer.echo(json.dumps(asdict(links)))
        return
    for kind, link in links.kinds.items():
        typer.echo(f"{kind:15s} {link.latency_s * 1e6:9.1f} us  {link.bytes_per_s / 1e9:7.3f} GB/s a device")
    typer.echo(f"{'products':15s} {links.flops_per_s / 1e9:9.1f} Gflop/s")
    least = f"{links.operator_s * 1e6:.1f} us an operator"
    typer.echo(f"{'single elements':15s} {links.memory_bytes_per_s / 1e9:9.1f} GB/s, {least}")
    typer.echo(f"kept in {path}")
