"""Micro-batches: a call's batch in parts, one after the other, so that the stages of a pipeline work at once.

The parts are issued without waiting in between. Workers run what concerns them in that order, so a stage begins the next
part as soon as it has handed on the last one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtorch.client.tensor import DTensor
from dtorch.core.errors import PlacementError
from dtorch.parallel.inputs import map_tensors


def in_micro_batches(module: nn.Module, count: int) -> None:
    """Let every call of ``module`` run in up to ``count`` parts of its batch, dimension 0 of its first tensor argument.

    Calls with a cache of keys and values run whole, as their cache belongs to the whole batch; none is made otherwise.

    Raises (the changed module):
        PlacementError: it returns what cannot be joined, such as the mean loss.
    """
    whole = module.forward
    takes_cache = "use_cache" in inspect.signature(whole).parameters

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, DTensor) and a.dim() > 0), None)
        cached = kwargs.get("past_key_values") is not None or bool(kwargs.get("use_cache"))
        if first is None or cached:
            return whole(*args, **kwargs)
        batch, pieces = first.shape[0], first._h.spec.shards_of(0)
        parts = next(n for n in range(min(count, batch), 0, -1) if batch % (pieces * n) == 0 or n == 1)
        if parts == 1:
            return whole(*args, **kwargs)
        if takes_cache:
            kwargs["use_cache"] = False
        results = []
        for i in range(parts):
            change = functools.partial(_part, batch=batch, pieces=pieces, parts=parts, index=i)
            results.append(whole(*map_tensors(args, change), **map_tensors(kwargs, change)))
        return _joined(results, pieces, type(module).__name__)

    module.forward = forward


def _part(t: torch.Tensor, batch: int, pieces: int, parts: int, index: int) -> torch.Tensor:
    """Every device's share of the batch in ``parts``, the ``index``-th of them: nothing moves between devices."""
    if t.dim() == 0 or t.shape[0] != batch:
        return t
    return t.view(pieces, parts, batch // (pieces * parts), *t.shape[1:]).select(1, index).flatten(0, 1)


def _joined(values: Sequence[Any], pieces: int, owner: str) -> Any:
    """The results of all parts as one: the inverse of ``_part`` for every tensor in them."""
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim() > 0:
        rows = [v.view(pieces, -1, *v.shape[1:]) for v in values]
        return torch.stack(rows, 1).flatten(0, 2)
    if first is None or isinstance(first, (bool, int, str)):
        return first
    if isinstance(first, dict):
        joined = {k: _joined([v[k] for v in values], pieces, owner) for k in first}
        return type(first)(**joined) if type(first) is not dict else joined
    if type(first) in (list, tuple):
        return type(first)(_joined(list(v), pieces, owner) for v in zip(*values, strict=True))
    what = "a tensor without dimensions (a loss?)" if isinstance(first, torch.Tensor) else f"a {type(first).__name__}"
    raise PlacementError(
        f"{owner} returned {what} for each of {len(values)} micro-batches, and these cannot be joined into one. Compute "
        "the loss from the results, train with a schedule of dtorch.parallel, or use microbatches=1."
    )
