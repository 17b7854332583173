"""Modules that say where their parameters lie; everything else of ``torch.nn`` falls through."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.nn.layers import (
    ColumnParallelLinear,
    ColumnParallelLinearWithReplicateOutput,
    EmbeddingWithReplicateOutput,
    RowParallelLinear,
    RowParallelLinearWithReplicateOutput,
)
from dtorch.nn.module import Module

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateOutput",
    "EmbeddingWithReplicateOutput",
    "Module",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
]


def __getattr__(name: str) -> Any:
    return getattr(torch.nn, name)
