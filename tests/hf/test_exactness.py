"""Operators whose CPU kernel depends on more than their arguments' values: what models on the mesh once differed in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .toys import on_mesh, same

BOTH = pytest.mark.parametrize("mesh", ["inline", "local"], indirect=True)
LAYERS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


@BOTH
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_on_a_transposed_stack(bias: bool, trained: bool, mesh: Any) -> None:
    """torch copies the stack into one matrix only if the weight requires a gradient, even where none is recorded."""
    layer = nn.Linear(64, 48, bias=bias).requires_grad_(trained)
    there = on_mesh(layer)
    x = torch.randn(3, 12, 64)
    y = x.to("dtorch")
    same(there(y.transpose(0, 1)), layer(x.transpose(0, 1)))
    same(there(y[:, 2:5]), layer(x[:, 2:5]))
    same(there(y[:, -1:]), layer(x[:, -1:]))
    with torch.inference_mode():
        same(there(y.transpose(0, 1)), layer(x.transpose(0, 1)))
    with torch.enable_grad():
        same(there(y.transpose(0, 1)), layer(x.transpose(0, 1)).detach())


@pytest.mark.parametrize("trained", [True, False])
def test_matmul_with_a_transposed_stack(trained: bool) -> None:
    matrix = nn.Parameter(torch.randn(64, 64), requires_grad=trained)
    stack = torch.randn(3, 64, 12)
    there, y = nn.Parameter(matrix.detach().to("dtorch"), requires_grad=trained), stack.to("dtorch")
    same(y.transpose(1, 2) @ there, stack.transpose(1, 2) @ matrix)
    same(there @ y, matrix @ stack)


def test_attention_across(mesh: Any) -> None:
    layer = nn.MultiheadAttention(64, 4).eval()
    there = on_mesh(layer)
    query, memory = torch.randn(5, 2, 64), torch.randn(9, 2, 64)
    same(there(query.to("dtorch"), *[memory.to("dtorch")] * 2), layer(query, memory, memory))


@BOTH
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=["one", "four"])
@pytest.mark.parametrize("kind", LAYERS)
def test_recurrent_networks(kind: str, options: dict[str, Any], batch_first: bool, mesh: Any) -> None:
    layer = LAYERS[kind](8, 16, batch_first=batch_first, **options)
    there = on_mesh(layer)
    x = torch.randn(3, 5, 8)
    y = x.to("dtorch")
    got, want = there(y), layer(x)
    same(got, want)
    same(there(y, got[1]), layer(x, want[1]))
    with torch.inference_mode():
        same(there(y), layer(x))


def test_recurrent_network_on_samples_that_are_spread() -> None:
    import dtorch

    layer = nn.LSTM(8, 16, batch_first=True)
    x = torch.randn(5, 4, 8)
    with dtorch.DeviceMesh("cpu", [0, 1, 2]) as mesh:
        there = copy.deepcopy(layer).to("dtorch")
        got, _ = there(dtorch.distribute_tensor(x, mesh, [dtorch.Shard(0)]))
    assert got.placements == (dtorch.Shard(0),)
    torch.testing.assert_close(got.to_torch(), layer(x)[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_sequences(batch_first: bool) -> None:
    x = torch.randn(3, 5, 8) if batch_first else torch.randn(5, 3, 8)
    lengths = torch.tensor([2, 5, 3])
    layer = nn.GRU(8, 16, batch_first=batch_first)
    there, y = on_mesh(layer), x.to("dtorch")
    with torch.enable_grad():
        pairs = []
        for m, data in ((layer, x.requires_grad_()), (there, y.requires_grad_())):
            packed = pack_padded_sequence(data, lengths, batch_first=batch_first, enforce_sorted=False)
            assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
            out, _ = pad_packed_sequence(m(packed)[0], batch_first=batch_first)
            out.square().sum().backward()
            pairs.append((packed.data.detach(), out.detach(), data.grad))
    (want_packed, *want), (got_packed, *got) = pairs
    same(got_packed, want_packed)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.to_torch(), b)
