"""linear and matmul under autograd as one operator each, forward and backward.

torch writes both as products of matrices, folding all leading dimensions into rows. A cut of any of them but the first
does not survive that: a sequence that is cut for context or sequence parallelism would be gathered for every layer. The
derivatives here are torch's own for the folded product, to the bit; workers fold what they hold.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.client.dispatch import dispatch
from dtorch.client.tensor import DTensor
from dtorch.core.torch_private import in_function_transform

aten = torch.ops.aten


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """``aten.linear`` with a derivative, or ``NotImplemented`` where torch's parts serve as well or better."""
    if not _ours(x, weight, bias) or x.dim() < 2 or weight.dim() != 2:
        return NotImplemented
    return _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]


def matmul(a: torch.Tensor, b: torch.Tensor) -> Any:
    """``aten.matmul`` with a derivative, or ``NotImplemented``: of a stack with one matrix or with an equal stack."""
    folds = a.dim() >= 3 and (b.dim() == 2 or a.shape[:-2] == b.shape[:-2])
    if not folds or not _ours(a, b):
        return NotImplemented
    return _Matmul.apply(a, b)  # type: ignore[no-untyped-call]


def _ours(*values: Any) -> bool:
    """Whether all are distributed, and nothing but autograd looks on (``torch.func`` and forward mode want parts)."""
    return all(v is None or isinstance(v, DTensor) for v in values) and not in_function_transform()


def _row_products(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor) -> Any:
    """``a^T b`` of all rows, (..., n) and (..., k) to (n, k), in the shape of ``like``."""
    if torch.is_grad_enabled():  # for a second derivative
        return a.reshape(-1, a.shape[-1]).t() @ b.reshape(-1, b.shape[-1])
    return dispatch(DTensor, aten.linear_backward.default, (), (b, a, like, [False, True, False]), {})[1]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        return dispatch(DTensor, aten.linear.default, (), (x, weight, bias), {})

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        return (
            grad.matmul(weight) if for_x else None,
            _row_products(grad, x, weight) if for_weight else None,
            grad.sum(tuple(range(grad.dim() - 1))) if for_bias else None,
        )


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.save_for_backward(a, b)
        return dispatch(DTensor, aten.matmul.default, (), (a, b), {})

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        for_a, for_b = ctx.needs_input_grad
        return grad.matmul(b.mT) if for_a else None, _second(grad, a, b) if for_b else None


def _second(grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    """The gradient of the second factor; of a column-major matrix as torch computes it, transposed."""
    if b.dim() > 2:
        return a.mT.matmul(grad)
    if b.stride(0) == 1 and b.stride(1) == b.shape[0]:
        return _row_products(grad, a, b.t()).t()
    return _row_products(a, grad, b)
