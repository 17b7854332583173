"""Where pictures are written: checked before the work, replaced as a whole after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from dtorch.cli.errors import InputError

SUFFIXES = (".png", ".webp", ".jpg", ".jpeg")


def output_paths(out: Path, num_images: int) -> list[Path]:
    """One path per picture: `out` itself, or ``cat-0.png``, ``cat-1.png``, ... for ``cat.png`` and several pictures.

    Raises:
        InputError: no picture can be written there; found out by writing a file, which is removed again.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise InputError(f"--out {out}: the file name must end in one of {', '.join(SUFFIXES)}.")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; make it first.")
    paths = [out] if num_images == 1 else [out.with_stem(f"{out.stem}-{i}") for i in range(num_images)]
    for path in paths:
        if path.is_dir():
            raise InputError(f"--out {out}: {path} is a folder; give the name of a file.")
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=".dtorch-"):
            return paths
    except OSError as error:
        raise InputError(f"--out {out}: cannot write to {out.parent} ({error.strerror}); choose another.") from error


def save_pictures(pictures: list[Any], paths: list[Path]) -> None:
    """Write each `PIL.Image.Image` to its path. An older file there stays whole until the new one is.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    for picture, path in zip(pictures, paths, strict=True):
        partial = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
        try:
            picture.save(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
