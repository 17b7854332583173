"""Host copies of small tensors made from host data, followed through the operators that work on nothing else.

Masks, positions, timesteps and stopping flags are such tensors; their checks (``if mask.all()``) then cost no round
trip to a worker.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.client.wrap import live_shadow, small_enough
from dtorch.core.torch_private import outside_of_dispatch
from dtorch.planner.call import is_view

# Real numbers are followed this far: schedules are short computations; a loop on small tensors is not one.
_DEPTH = 16
_WITHOUT = frozenset({"aten.empty_like", "aten.new_empty", "aten.new_empty_strided"})


def follow(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Any], plan: Any) -> None:
    """Run the operator on the host copies too; written arguments lose theirs when that is not possible."""
    specs = [o._h.spec for o in outs if type(o) is cls]
    depth = 1 + max((t._h.depth for t in (*args, *kwargs.values()) if type(t) is cls), default=0)
    name = plan.call.name
    moved = is_view(func) or name == "aten.clone"  # a repeated schedule takes two dimensions on its way
    able = not plan.random and name not in _WITHOUT and all(small_enough(s.shape, s.dtype, moved) for s in specs)
    if depth > _DEPTH and any(s.dtype.is_floating_point for s in specs):
        able = False
    host: Any = None
    if able:
        host = on_host(cls, func, args, kwargs)
    if host is None:
        forget(outs, plan)
        return
    values = [v for v in (host if isinstance(host, (list, tuple)) else [host]) if isinstance(v, torch.Tensor)]
    for out, value, r in zip(outs, values, plan.results, strict=True):
        if not r.same:
            out._h.shadow = value
        out._h.depth = depth


def on_host(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator on the host copies, or ``None`` when one is missing."""
    missing = False

    def convert(value: Any) -> Any:
        nonlocal missing
        if type(value) is cls:
            shadow = live_shadow(value._h)
            missing = missing or shadow is None
            return shadow
        if isinstance(value, (list, tuple)):
            return [convert(v) for v in value]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value

    new_args = [convert(a) for a in args]
    new_kwargs = {k: convert(v) for k, v in kwargs.items()}
    if missing:
        return None
    with outside_of_dispatch(), torch.inference_mode(False), torch.no_grad():
        try:
            return func(*new_args, **new_kwargs)
        except Exception:  # a worker fails likewise and says so, or has a kernel of ours where torch's CPU has none
            return None


def forget(outs: list[Any], plan: Any) -> None:
    """Written arguments have no host copy any more, nor has what shares their memory."""
    for out, r in zip(outs, plan.results, strict=False):
        if r.same:
            lose(out)


def forget_written(cls: Any, info: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The same for an operator that had an input without host copy."""
    arguments = func._schema.arguments
    for i in info.writes:
        written = args[i] if i < len(args) else kwargs.get(arguments[i].name)
        for t in written if isinstance(written, (list, tuple)) else (written,):
            if type(t) is cls:
                lose(t)


def lose(t: Any) -> None:
    """Drop the host copy of a tensor that was written from the workers' side."""
    h = t._h
    h.shadow = None
    if h.family is not None:
        h.family.shadow_lost = True
