"""Reductions: a cut dimension leaves the result Partial where the reduction can be finished later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.redistribute import reducible
from dtorch.planner.rule import Label, Labels, Rule, rule

_FINISH = {
    "aten.sum": "sum", "aten.nansum": "sum", "aten.amax": "max", "aten.amin": "min", "aten.prod": "product",
    "aten.count_nonzero": "sum", "aten.max": "max", "aten.min": "min", "aten.all": "min", "aten.any": "max",
}  # fmt: skip


def _dims(call: Call) -> set[int]:
    n = call.first.ndim
    dims = call.get("dim")
    if dims is None or dims == [] or dims == ():
        return set(range(n))
    return {d % n if n else 0 for d in ([dims] if isinstance(dims, int) else dims)}


def _shapes(call: Call, outs: Sequence[torch.Tensor], dims: set[int]) -> tuple[Labels, Labels]:
    n = call.first.ndim
    labels: tuple[Label, ...] = tuple(("over", d) if d in dims else ("kept", d) for d in range(n))
    if outs[0].ndim == n and n:
        return labels, tuple(None if d in dims else ("kept", d) for d in range(n))
    return labels, tuple(("kept", d) for d in range(n) if d not in dims)


@rule(
    "aten.sum", "aten.nansum", "aten.amax", "aten.amin", "aten.prod", "aten.count_nonzero", "aten.all", "aten.any",
    "aten.max", "aten.min",
)  # fmt: skip
def finishable(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Sums, products, extrema: each device reduces its piece."""
    kind = _FINISH[call.name]
    if len(outs) > 1 or len(call.specs) > 1 or not reducible(kind, outs[0].dtype):
        return along(call, outs)
    dims = _dims(call)
    inputs, outputs = _shapes(call, outs, dims)
    # An extremum of nothing is an error, also on a device whose piece is empty; the kernel puts in the neutral value.
    kernel = "reduce_piece" if kind in ("max", "min") and call.name not in ("aten.all", "aten.any") else None
    over = {("over", d): kind for d in dims}
    linear = (frozenset({0}),) if call.name == "aten.sum" else ()
    return Rule([inputs], [outputs], reduce=over, linear=linear, kernels=dict.fromkeys(over, kernel) if kernel else {})


@rule("aten.mean")
def mean(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each device contributes its sum divided by the global count, so pieces of any size weigh right."""
    dims = _dims(call)
    inputs, outputs = _shapes(call, outs, dims)
    over = {("over", d): "sum" for d in dims}
    return Rule([inputs], [outputs], reduce=over, linear=(frozenset({0}),), kernels=dict.fromkeys(over, "mean_piece"))


@rule(
    "aten.var", "aten.std", "aten.var_mean", "aten.std_mean", "aten.logsumexp", "aten.norm", "aten.linalg_vector_norm",
    "aten.median", "aten.nanmedian", "aten.mode", "aten.kthvalue", "aten.argmax", "aten.argmin", "aten.aminmax",
    "aten.quantile", "aten.nanquantile", "aten.hash_tensor",
)  # fmt: skip
def along(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Reductions that need the reduced dimensions whole."""
    dims = _dims(call)
    inputs, outputs = _shapes(call, outs, dims)
    inputs = tuple(x if x[0] == "kept" else None for x in inputs)
    return Rule([inputs], [outputs] * len(outs))
