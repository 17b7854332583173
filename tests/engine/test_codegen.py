"""The functions that compiled plans call in place of operators do what the operators do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.worker.codegen import _FUNCTIONS, function_of

aten = torch.ops.aten
X, Y = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
M, N, V = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4)
QKV = torch.randn(2, 2, 3, 4)
CALLS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "add.Tensor": [((X, Y), {}), ((X, Y), {"alpha": 3}), ((X, 2), {}), ((X, 2.5), {"alpha": 2}), ((X.int(), 2), {})],
    "sub.Tensor": [((X, Y), {}), ((X, Y), {"alpha": 0.5}), ((X, 2), {})],
    "mul.Tensor": [((X, Y), {}), ((X, 2), {}), ((X.int(), 2.5), {})],
    "div.Tensor": [((X, Y), {}), ((X.int(), 2), {})],
    "mm.default": [((M, N), {})],
    "bmm.default": [((X, Y.transpose(1, 2)), {})],
    "addmm.default": [((torch.randn(5), M, N), {}), ((torch.randn(5), M, N), {"beta": 2, "alpha": 0})],
    "transpose.int": [((X, 0, -1), {})],
    "t.default": [((M,), {})],
    "unsqueeze.default": [((X, -1), {})],
    "permute.default": [((X, [2, 0, 1]), {})],
    "cat.default": [(([X, Y],), {}), (([X, Y], -1), {})],
    "clone.default": [((X.transpose(0, 1),), {}), ((X.transpose(0, 1),), {"memory_format": torch.contiguous_format})],
    "layer_norm.default": [((X, [4]), {}), ((X, [4], V, V, 1e-3), {}), ((X, [4], V, None, 1e-3, False), {})],
    "select.int": [((X, 1, -1), {})],
    "embedding.default": [((M, torch.tensor([[0, 2]])), {}), ((M, torch.tensor([1]), 0), {}), ((M, torch.tensor([1]), -1, False, False), {})],
    "matmul.default": [((X, N), {}), ((V, N), {})],
    "where.self": [((X > 0, X, Y), {}), ((X > 0, X, torch.tensor(2.0)), {})],
    "pow.Tensor_Scalar": [((X, 2), {}), ((X, 0.5), {}), ((X.int(), 2), {})],
    "mean.dim": [((X, [-1], True), {}), ((X, [0, 2]), {}), ((X.int(), [1]), {"dtype": torch.float64}), ((X, None), {})],
    "eq.Tensor": [((X, Y), {})],
    "eq.Scalar": [((X, 1), {})],
    "ne.Scalar": [((X, 1.5), {})],
    "bitwise_and.Tensor": [((X > 0, Y > 0), {}), ((X.int(), Y.int()), {})],
    "linear.default": [((M, N.t()), {}), ((M, N.t(), torch.randn(5)), {})],
    "gelu.default": [((X,), {}), ((X,), {"approximate": "tanh"})],
    "scaled_dot_product_attention.default": [
        ((QKV, QKV, QKV), {}), ((QKV, QKV, QKV, None, 0.0, True), {"scale": 0.3}), ((QKV, QKV, QKV, torch.ones(3, 3).tril().bool()), {}),
        ((QKV, QKV[:, :1], QKV[:, :1]), {"enable_gqa": True}),
    ],
    "view.default": [((X, [6, 4]), {}), ((X, [-1]), {})],
    "expand.default": [((V, [2, 3, 4]), {}), ((V[None], [-1, 4]), {})],
    "add_.Tensor": [((X, Y), {}), ((X, 2), {"alpha": 3})],
    "mul_.Tensor": [((X, Y), {}), ((X, 2), {})],
    "copy_.default": [((X, Y), {}), ((X, V.double()), {}), ((X, V, True), {})],
}  # fmt: skip
UNARY = ["neg", "cos", "sin", "rsqrt", "sqrt", "exp", "sigmoid", "tanh", "relu", "silu"]
CALLS |= {f"{name}.default": [((X.abs() + 0.1,), {}), ((X.abs().double() + 1,), {})] for name in UNARY}


def test_every_function_is_checked():
    assert CALLS.keys() >= _FUNCTIONS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_function_and_operator_agree(name):
    packet, overload = name.split(".")
    op = getattr(getattr(aten, packet), overload)
    for args, kwargs in CALLS[name]:
        copies = [[a.clone() if isinstance(a, torch.Tensor) and packet.endswith("_") else a for a in args] for _ in range(2)]
        want, got = op(*copies[0], **kwargs), function_of(op)(*copies[1], **kwargs)
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert torch.equal(torch.nan_to_num(got.float(), 0.5), torch.nan_to_num(want.float(), 0.5))
        assert (got.untyped_storage().data_ptr() == copies[1][0].untyped_storage().data_ptr()) == (
            want.untyped_storage().data_ptr() == copies[0][0].untyped_storage().data_ptr()
        ) if isinstance(args[0], torch.Tensor) else True
        assert not packet.endswith("_") or got is copies[1][0]
