"""Placement rules, one file for each family of operators; importing this package registers them all."""

from dtorch.planner.rules import matmul, pointwise, reductions, views
from dtorch.planner.rules.pointwise import default_rule

__all__ = ["default_rule", "matmul", "pointwise", "reductions", "views"]
