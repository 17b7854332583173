"""The ``dtorch`` device exists as soon as a program has imported torch and dtorch, in whichever order.

``import dtorch`` does not import torch. Where torch is there already, the device is registered at once; otherwise when
torch has been imported, unless a module of dtorch does that for itself (a worker has no use for the device).
"""

from __future__ import annotations

import importlib
import sys

from dtorch.core.imports import after_import


def _imported_by_dtorch() -> bool:
    """Whether a module of dtorch stands on the stack, other than those that watch imports."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("dtorch.") and name not in (__name__, after_import.__module__):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _register() -> None:
    if not _imported_by_dtorch():
        importlib.import_module("dtorch.api")


def watch() -> None:
    """Register the device now, or once torch is there."""
    after_import("torch", _register)
