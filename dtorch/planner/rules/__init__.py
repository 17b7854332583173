"""Placement rules, one file for each family of operators; importing this package registers them all."""

from dtorch.planner.rules import (
    along,
    attention,
    convolution,
    embedding,
    indexing,
    linalg,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    recurrent,
    reductions,
    shapes,
    spectral,
    views,
)
from dtorch.planner.rules.pointwise import default_rule

__all__ = [
    "along", "attention", "convolution", "default_rule", "embedding", "indexing", "linalg", "losses", "matmul", "norms",
    "pointwise", "pooling", "recurrent", "reductions", "shapes", "spectral", "views",
]  # fmt: skip
