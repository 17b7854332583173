"""Tiny diffusers pipelines with random weights, each with one call: what ``diffusers_sweep.py`` and the tests run.

A case is a function of a ``Place``. It builds its pipeline afresh (weights depend on names and shapes alone), puts it
there, calls it, and returns the results as plain tensors. No case knows dtorch.
"""

from __future__ import annotations

from . import features, images, schedulers, stable, videos  # they register their cases
from .registry import CASES, Case, Place

__all__ = ["CASES", "Case", "Place", "features", "images", "schedulers", "stable", "videos"]
