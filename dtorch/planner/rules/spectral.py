"""Fourier transforms: transformed dimensions are whole, all others may be cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Rule, rule
from dtorch.planner.rules.along import whole_along
from dtorch.planner.rules.named import UNLESS_EMPTY


@rule("aten._fft_r2c", "aten._fft_c2c", "aten._fft_c2r")
def fft(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The transform of a sum is the sum of the transforms."""
    labels = whole_along(call["dim"], call.first.ndim)
    return Rule([labels], [labels], linear=(frozenset({0}),), kernel=UNLESS_EMPTY)
