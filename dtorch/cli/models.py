"""`dtorch models`: the registry as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dtorch.models import DEMO_TEXT_MODEL, MODELS
from dtorch.models.registry import Sampling


def models() -> None:
    """List the models that dtorch knows by name."""
    table = Table("name", "model", "task", "pipeline", "defaults", "defaults of the demo")
    for entry in MODELS.values():
        defaults, demo_defaults = _describe(entry.sampling), _describe(entry.demo_sampling)
        table.add_row(entry.name, entry.title, entry.task, entry.pipeline_name, defaults, demo_defaults)
    console = Console()
    console.print(table)
    console.print(
        f"dtorch generate runs every causal language model of transformers; its demo is a small {DEMO_TEXT_MODEL.title}."
    )


def _describe(sampling: Sampling) -> str:
    size = [] if sampling.size is None else [f"{sampling.size} x {sampling.size} pixels"]
    return "\n".join([f"{sampling.steps} steps", f"guidance {sampling.guidance:g}", *size])
