"""Helpers with which rules give labels by argument name, whichever optional tensors a call has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtorch.planner.call import Call
from dtorch.planner.rule import Label, Labels

# Runs the operator unless this device's piece of a cut dimension is empty, which many operators refuse.
UNLESS_EMPTY = "unless_empty"


def slots(call: Call, **labels: Labels) -> list[Labels]:
    """Labels in slot order of the tensor arguments named; a tensor argument without labels must be whole."""
    found: list[Labels] = [(None,) * s.ndim for s in call.specs]
    for name, slot in call.slots.items():
        if name in labels:
            assert len(labels[name]) == call.specs[slot].ndim, f"{call.func}: {labels[name]} are the labels of {name}?"
            found[slot] = labels[name]
    return found


def wanted(call: Call, outputs: Sequence[Any], mask: str = "output_mask") -> list[Any]:
    """Those of the outputs that the call's ``output_mask`` asks for."""
    return [labels for labels, asked in zip(outputs, call[mask], strict=True) if asked]


def sums(labels: Labels) -> dict[Label, str]:
    """For ``Rule.reduce``: each of the labels leaves sums in results that lack it."""
    return {x: "sum" for x in labels if x is not None}


def leading(ndim: int, whole: int) -> Labels:
    """Labels of independent dimensions before ``whole`` dimensions that every device must hold whole."""
    return tuple(range(ndim - whole)) + (None,) * whole
