"""Reduces the terms of a partial tensor, in a fixed order, for every dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}

# Three or more 16-bit terms are rounded once, at the end; the other dtypes here have no arithmetic in torch.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_NO_ARITHMETIC = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,  # sums and products wrap around to the same bits
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}


def reduce_terms(terms: Sequence[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """The reduction of terms of equal shape and dtype, first to last, as a new tensor of that dtype.

    bool adds as "or" and multiplies as "and". The average of integers is rounded down and cannot overflow.

    Args:
        reduce_op: one that `dtorch.planner.redistribute.reducible` allows for the dtype.
    """
    dtype, n = terms[0].dtype, len(terms)
    if n == 1:
        return terms[0].clone()
    if reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return _integer_average(terms)
    wide = _NO_ARITHMETIC.get(dtype) or (_WIDER.get(dtype) if n > 2 or reduce_op == "avg" else None)
    if wide is not None:
        terms = [t.to(wide) for t in terms]
    combine = _COMBINE[reduce_op]
    total = combine(terms[0], terms[1])
    for t in terms[2:]:
        combine(total, t, out=total)
    if reduce_op == "avg":
        total /= n
    return total if wide is None else total.to(dtype)


def _integer_average(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """floor(sum / n): whole quotients and remainders apart, so that no sum exceeds 64 bits."""
    n = len(terms)
    wide = [t.to(torch.int64) for t in terms]
    quotient = sum((t.div(n, rounding_mode="floor") for t in wide), torch.zeros_like(wide[0]))
    remainder = sum((t.remainder(n) for t in wide), torch.zeros_like(wide[0]))
    return (quotient + remainder.div(n, rounding_mode="floor")).to(terms[0].dtype)
