"""Norms over cut dimensions of large tensors: every device sums powers of its own part, and one number travels.

As clipping gradients of cut parameters needs it. Small tensors are gathered instead, by their placement rule: that
costs the same and keeps the bits of one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.client.dispatch import info_of, run
from dtorch.client.specials import Args, Kwargs, special
from dtorch.core.placements import Shard
from dtorch.planner.redistribute import LATENCY_BYTES

aten = torch.ops.aten


@special(aten.linalg_vector_norm.default)
def vector_norm(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """One norm; ``dim`` may be a number, a list, or nothing for all dimensions."""
    given = {"ord": 2, "dim": None, "keepdim": False, "dtype": None, **kwargs}
    given.update(zip(("self", "ord", "dim", "keepdim"), args, strict=False))
    x, dims = given["self"], given["dim"]
    dims = list(range(x.ndim)) if not dims and dims != 0 else [dims] if isinstance(dims, int) else list(dims)
    if not _is_large(x, dims):
        return run(cls, func, info_of(func), args, kwargs)
    return _finish(*_parts(x, given["ord"], dims, given["keepdim"], given["dtype"]), given["ord"])


@special(aten._foreach_norm.Scalar)
def foreach_norm(cls: type, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A norm for each tensor of a list; the sums of all large ones are finished together."""
    given = {"ord": 2, "dtype": None, **kwargs}
    given.update(zip(("self", "ord", "dtype"), args, strict=False))
    tensors, order = given["self"], given["ord"]
    large = [i for i, x in enumerate(tensors) if _is_large(x, range(x.ndim))]
    if not large:
        return run(cls, func, info_of(func), args, kwargs)
    found: dict[int, Any] = {}
    small = [i for i in range(len(tensors)) if i not in large]
    if small:
        norms = run(cls, func, info_of(func), ([tensors[i] for i in small], order, given["dtype"]), {})
        found.update(zip(small, norms, strict=True))
    parts = [_parts(tensors[i], order, list(range(tensors[i].ndim)), False, given["dtype"]) for i in large]
    for dtype in {dtype for _, dtype in parts}:
        group = [i for i, part in zip(large, parts, strict=True) if part[1] == dtype]
        sums = torch.stack([total for total, kind in parts if kind == dtype])
        found.update(zip(group, _finish(sums, dtype, order).unbind(), strict=True))
    return [found[i] for i in range(len(tensors))]


def _is_large(x: Any, dims: Sequence[int]) -> bool:
    """Whether gathering the tensor along the dimensions to be reduced costs more than adding numbers."""
    spec = x._h.spec
    reduced = {d % x.ndim for d in dims} if x.ndim else set()
    cut = any(isinstance(p, Shard) and p.dim in reduced for p in spec.placements)
    return cut and spec.nbytes > LATENCY_BYTES


def _parts(x: Any, order: float, dims: list[int], keepdim: bool, dtype: torch.dtype | None) -> tuple[Any, torch.dtype]:
    """What is left to reduce and then to finish, and the dtype of the norm."""
    x = x if dtype is None else x.to(dtype)
    result = torch.empty(0, dtype=x.dtype).abs().dtype
    size = x.abs() if x.is_complex() or order != 2 else x
    if result.itemsize < 4:
        size = size.float()  # as torch does inside of its own kernel: squares overflow half precision early
    if math.isinf(order):
        return (size.amax if order > 0 else size.amin)(dims, keepdim), result
    if order == 0:
        size = (size != 0).to(size.dtype)
    elif order == 2:
        size = size.square()
    elif order != 1:
        size = size**order
    return size.sum(dims, keepdim), result


def _finish(total: Any, dtype: torch.dtype, order: float) -> Any:
    if order == 2:
        total = total.sqrt()
    elif order not in (0, 1) and not math.isinf(order):
        total = total ** (1 / order)
    return total.to(dtype)
