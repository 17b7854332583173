"""Recurrent networks and their cells: samples are independent, a sample's gates and state belong together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.planner.call import Call
from dtorch.planner.rule import Labels, Rule, replicated, rule
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


@rule("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")
def network(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Sequence and states of every sample; the states are (layers, n, features)."""
    if call.first.ndim != 3:
        return replicated(call, outs)
    sequence: Labels = ("n", None, None) if call["batch_first"] else (None, "n", None)
    states = call.slots["hx"] if isinstance(call.slots["hx"], list) else [call.slots["hx"]]
    inputs: list[Labels] = [(None,) * s.ndim for s in call.specs]
    for slot in (0, *states):
        inputs[slot] = sequence if slot == 0 else (None, "n", None)
    return Rule(inputs, [sequence, *((None, "n", None) for _ in outs[1:])], kernel=UNLESS_EMPTY)


@rule("aten.gru_cell")
def gru_cell(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Input and state of every sample."""
    inputs: list[Labels] = [("n", None) if slot < 2 else (None,) * s.ndim for slot, s in enumerate(call.specs)]
    return Rule(inputs, [("n", None)], kernel=UNLESS_EMPTY)
