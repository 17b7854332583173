"""Demo models in the user's cache, built once and never seen half built."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path

from .registry import DemoEntry

# What the bytes of a demo depend on.
_SOURCES = tuple(
    Path(__file__).with_name(f"{name}.py") for name in ("demo", "demo_text", "demo_tokenizers", "demo_weights")
)


def cache_folder() -> Path:
    """Where demo models are kept: ``$XDG_CACHE_HOME/dtorch/models``, or ``~/.cache/dtorch/models``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"  # the XDG rules ignore a relative path
    return root / "dtorch" / "models"


def recipe_hash(entry: DemoEntry) -> str:
    """Twelve hex digits over all that decides the bytes of the entry's demo: recipe, building code, libraries."""
    parts = {name: dataclasses.asdict(part) for name, part in entry.demo_parts.items()}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "diffusers", "transformers", "tokenizers")}
    digest = hashlib.sha256(json.dumps([entry.pipeline, parts, versions], sort_keys=True).encode())
    for path in _SOURCES:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def demo_folder(entry: DemoEntry) -> Path:
    """The folder of the entry's demo model, built first if it is not there. Blocks while it builds, about a second.

    The model is built beside its place and renamed into it, so a folder with the final name is always whole, and
    of two processes that build at once one wins and both use the result.

    Raises:
        OSError: the cache cannot be written.
    """
    target = cache_folder() / f"{entry.name}-{recipe_hash(entry)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=target.parent))
    try:
        entry.build_demo(entry.pipeline, entry.demo_parts, building)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target
