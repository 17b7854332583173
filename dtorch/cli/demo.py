"""The demo model of a command that was given no model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dtorch.cli.errors import FailureError
from dtorch.cli.progress import Stages
from dtorch.models import DemoEntry, ModelInputError


def usable_demo(entry: DemoEntry, stages: Stages, check: Callable[[Path], None]) -> Path:
    """The folder of the entry's demo model, built on first use.

    Args:
        check: raises ModelInputError for a folder that is not whole.

    Raises:
        FailureError: it cannot be written, or what lies in the cache is damaged.
    """
    from dtorch.models.cache import cache_folder, demo_folder

    try:
        with stages.stage("build"):
            folder: Path = demo_folder(entry)
    except OSError as error:
        raise FailureError(
            f"the demo model cannot be written to {cache_folder()} ({error}); set XDG_CACHE_HOME, or pass --model."
        ) from error
    try:
        check(folder)
    except ModelInputError as error:
        raise FailureError(f"the cached demo model is damaged: {error} Or remove {folder} to build it anew.") from error
    return folder
