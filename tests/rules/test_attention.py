"""Attention against plain torch: heads shared or not, masks, causal rows that start anywhere, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.worker.kernels_sequence import write_out_attention, write_out_attention_backward
from tests.rules.sweep import placements_of, spread, sweep

Function = Callable[..., Any]
FEW: dict[str, Any] = {"most": 1, "meshes": ((3,), (4,), (2, 2)), "thorough": ((3,),)}
aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _attention(**options: Any) -> Function:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return run


def with_gradients(run: Function) -> Function:
    """The result without a gradient in sight, the one on the way to gradients, and those."""

    def both(*values: torch.Tensor) -> list[Any]:
        given = [v.detach().requires_grad_() if v.is_floating_point() else v for v in values]
        given[3:] = values[3:]
        out = run(*given)
        return [run(*values), out.detach(), *torch.autograd.grad(out.sin().sum(), given[:3])]

    return both


_SEEN = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.4
_SEEN[:, 2] = True
_CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "plain": (_attention(), (_x(1, 3, 5, 4), _x(1, 3, 7, 4), _x(1, 3, 7, 4))),
    "scaled": (_attention(scale=0.3), (_x(2, 1, 5, 4), _x(2, 1, 5, 4), _x(2, 1, 5, 4))),
    "causal": (_attention(is_causal=True), (_x(1, 3, 7, 4), _x(1, 3, 7, 4), _x(1, 3, 7, 4))),
    "causal, more columns": (_attention(is_causal=True), (_x(1, 2, 5, 4), _x(1, 2, 7, 4), _x(1, 2, 7, 4))),
    "causal, more rows": (_attention(is_causal=True), (_x(1, 2, 7, 4), _x(1, 2, 3, 4), _x(1, 2, 3, 4))),
    "shared heads": (_attention(enable_gqa=True), (_x(1, 8, 5, 4), _x(1, 4, 5, 4), _x(1, 4, 5, 4))),
    "one shared head": (_attention(enable_gqa=True), (_x(1, 4, 3, 4), _x(1, 1, 3, 4), _x(1, 1, 3, 4))),
    "causal, shared heads": (_attention(enable_gqa=True, is_causal=True), (_x(1, 6, 5, 4), _x(1, 2, 5, 4), _x(1, 2, 5, 4))),
    "mask": (_attention(), (_x(1, 3, 5, 4), _x(1, 3, 7, 4), _x(1, 3, 7, 4), _SEEN)),
    "mask of a sample": (_attention(), (_x(3, 2, 5, 4), _x(3, 2, 7, 4), _x(3, 2, 7, 4), _SEEN.expand(3, 1, 5, 7).clone())),
    "mask of columns": (_attention(), (_x(3, 2, 5, 4), _x(3, 2, 7, 4), _x(3, 2, 7, 4), _SEEN[:3].view(3, 1, 1, 7).clone())),
    "bias": (_attention(), (_x(1, 3, 5, 4), _x(1, 3, 7, 4), _x(1, 3, 7, 4), _x(1, 3, 5, 7))),
    "bias, shared heads": (_attention(enable_gqa=True), (_x(1, 4, 5, 4), _x(1, 2, 5, 4), _x(1, 2, 5, 4), _x(1, 4, 5, 5))),
    "other values": (_attention(), (_x(2, 3, 5, 4), _x(2, 3, 7, 4), _x(2, 3, 7, 6))),
    "three dimensions": (_attention(is_causal=True), (_x(3, 5, 4), _x(3, 7, 4), _x(3, 7, 4))),
    "two dimensions": (_attention(), (_x(5, 4), _x(7, 4), _x(7, 4))),
    "five dimensions": (_attention(is_causal=True), (_x(2, 1, 3, 5, 4), _x(2, 1, 3, 5, 4), _x(2, 1, 3, 5, 4))),
    "broadcast": (_attention(), (_x(3, 2, 5, 4), _x(1, 2, 7, 4), _x(3, 1, 7, 4))),
}  # fmt: skip


@pytest.mark.parametrize("name", _CASES)
def test_values_and_gradients(name: str) -> None:
    run, values = _CASES[name]
    in_parts = name.endswith("dimensions") or name in ("broadcast", "other values")  # many operators for a gradient
    sweep(with_gradients(run), *values, exact=False, **{**FEW, "thorough": () if in_parts else FEW["thorough"]})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_half_precision_and_dropout(dropout: float) -> None:
    """Dropout draws the same numbers for every placement."""
    x = _x(2, 4, 6, 8).bfloat16()

    def run(q: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(3)
        with torch.no_grad():
            first = F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True)
        q = q.detach().requires_grad_()
        out = F.scaled_dot_product_attention(q, q, q, dropout_p=dropout, is_causal=True)
        return [first, out.detach(), *torch.autograd.grad(out.sum(), q)]

    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2])
    want = run(x)
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)):
        for g, w in zip(run(spread(x, mesh, [placement])), want, strict=True):
            torch.testing.assert_close(g.to_torch(), w, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_written_out(causal: bool, masked: bool) -> None:
    """What runs on devices without the CPU's fused kernel gives what that gives."""
    q, k, v, grad = _x(2, 6, 5, 4), _x(2, 2, 7, 4), _x(2, 2, 7, 4), _x(2, 6, 5, 4)
    mask = torch.zeros(5, 7).masked_fill(~_SEEN, float("-inf")) if masked and not causal else None
    want = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=0.4)
    got = write_out_attention(q, k, v, causal, mask, 0.4)
    torch.testing.assert_close(got, tuple(want))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    want = backward(grad, q, k, v, *want, 0.0, causal, attn_mask=mask, scale=0.4)
    torch.testing.assert_close(write_out_attention_backward(grad, q, k, v, *got, causal, mask, 0.4), tuple(want))


@pytest.mark.parametrize("mask", [None, 0, 1])
def test_encoder_layer(mask: int | None) -> None:
    """The layer that torch runs as one operator for inference, and part by part in training."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    x = _x(3, 5, 8)
    hidden = (
        torch.zeros(5, 5, dtype=torch.bool).triu(1) if mask == 0 else torch.arange(5) >= torch.tensor([[5], [3], [4]])
    )
    names = {0: "src_mask", 1: "src_key_padding_mask"}
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            want = layer(x, **({} if mask is None else {names[mask]: hidden}))
            for cut in (Replicate(), Shard(0), Shard(1), Shard(2)):
                mesh = dtorch.DeviceMesh("cpu", [0, 1])
                there = {n: spread(p.detach(), mesh, [Replicate()]) for n, p in layer.named_parameters()}
                given = {} if mask is None else {names[mask]: spread(hidden, mesh, [Replicate()])}
                got = torch.func.functional_call(layer, there, (spread(x, mesh, [cut]),), given)
                torch.testing.assert_close(got.to_torch(), want, rtol=1e-4, atol=1e-4)


def test_placements() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])

    def places(run: Function, values: list[torch.Tensor], cuts: list[Any]) -> list[Any]:
        given = [spread(v, mesh, [c]).detach().requires_grad_() for v, c in zip(values, cuts, strict=True)]
        with torch.no_grad():
            first = run(*given)
        out = run(*given)
        assert placements_of(first) == placements_of(out)
        gradients = torch.autograd.grad(out, given, torch.ones_like(out))
        return [placements_of(x)[0] for x in (out, *gradients)]

    rows, heads, samples, whole, total = Shard(2), Shard(1), Shard(0), Replicate(), Partial()
    values = [_x(2, 4, 6, 8) for _ in range(3)]
    causal = _attention(is_causal=True)
    assert places(causal, values, [heads] * 3) == [heads] * 4
    assert places(causal, values, [samples] * 3) == [samples] * 4
    assert places(causal, values, [rows, whole, whole]) == [rows, rows, total, total]
    assert places(causal, values, [rows] * 3)[:2] == [rows, rows]
    shared = [_x(1, 8, 6, 8), _x(1, 2, 6, 8), _x(1, 2, 6, 8)]
    assert places(_attention(enable_gqa=True), shared, [heads] * 3) == [heads] * 4
    mesh = dtorch.DeviceMesh("cpu", [0, 1, 2, 3])
    assert places(_attention(enable_gqa=True), shared, [heads, whole, whole]) == [heads, heads, total, total]
