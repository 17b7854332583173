"""Placement rules, one file for each family of operators; importing this package registers them all."""

from dtorch.planner.rules import along, indexing, linalg, matmul, pointwise, reductions, shapes, spectral, views
from dtorch.planner.rules.pointwise import default_rule

__all__ = [
    "along", "default_rule", "indexing", "linalg", "matmul", "pointwise", "reductions", "shapes", "spectral", "views",
]  # fmt: skip
