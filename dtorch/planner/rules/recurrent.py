"""Cells of recurrent networks: samples are independent, a sample's gates and state belong together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, Rule, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, sums


@rule(
    "aten._thnn_fused_lstm_cell", "aten._thnn_fused_lstm_cell_backward_impl", "aten._thnn_fused_gru_cell",
    "aten._thnn_fused_gru_cell_backward",
)  # fmt: skip
def cell(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every matrix is (n, gates or state); biases are vectors, their gradients sums over samples."""

    def labels(ndim: int) -> Labels:
        return ("n", None) if ndim == 2 else (None,)

    inputs = [labels(s.ndim) for s in call.specs]
    return Rule(inputs, [labels(o.ndim) for o in outs], reduce=sums(("n",)), kernel=UNLESS_EMPTY)
