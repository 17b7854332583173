"""Straight-line Python for the plans that a worker runs most.

The text compiled here is made of fixed pieces and numbers only. Whatever came over the wire (constants, operators)
enters through the function's namespace as a value; keyword names are checked when a plan is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

import torch

from dtorch.core.torch_private import nn_functions
from dtorch.protocol.plans import WirePlan
from dtorch.protocol.values import DeviceSlot, Number, Slot

Simple = Callable[[dict[int, Any], list[Any], int], int]

# Overloads whose Python function runs the same kernel and skips the slow way through the operator's schema
# (2 us a call). tests/engine/test_codegen.py checks each of them against the dispatcher.
_FUNCTIONS: dict[str, Any] = {
    **{
        name: getattr(torch, name.split(".")[0])
        for name in (
            "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "mm.default", "bmm.default", "addmm.default",
            "neg.default", "cos.default", "sin.default", "rsqrt.default", "sqrt.default", "exp.default",
            "sigmoid.default", "tanh.default", "relu.default", "transpose.int", "t.default", "unsqueeze.default",
            "permute.default", "cat.default", "clone.default", "layer_norm.default", "select.int", "embedding.default",
            "matmul.default", "pow.Tensor_Scalar", "mean.dim", "where.self",
            "eq.Tensor", "eq.Scalar", "ne.Scalar", "bitwise_and.Tensor",
        )
    },
    "linear.default": nn_functions.linear,
    "silu.default": nn_functions.silu,
    "gelu.default": nn_functions.gelu,
    "scaled_dot_product_attention.default": nn_functions.scaled_dot_product_attention,
    "view.default": torch.Tensor.view,
    "expand.default": torch.Tensor.expand,
    "add_.Tensor": torch.Tensor.add_,
    "mul_.Tensor": torch.Tensor.mul_,
    "copy_.default": torch.Tensor.copy_,
}  # fmt: skip


def function_of(op: Any) -> Callable[..., Any]:
    """The fastest callable for an overload."""
    namespace, name = op._schema.name.split("::")
    if namespace == "aten":
        found: Any = _FUNCTIONS.get(f"{name}.{op._overloadname}")
        if found is not None:
            return found  # type: ignore[no-any-return]
    return op._op  # type: ignore[no-any-return]


def compile_simple(
    plan: WirePlan,
    target: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    new: list[int],
) -> Simple:
    """``(store, commands, index) -> next index`` for one local device and results that need no mending.

    Args:
        plan: its slots are the operands, its results those to store.
        target: what to call.
        args, kwargs: with Slot, Number and DeviceSlot marks.
        new: indices of the results that take a new id.
    """
    names = {a.name for a in target._schema.arguments} if hasattr(target, "_schema") else None
    n = len(plan.slots)
    constants: dict[str, Any] = {"f": target}

    def text(value: Any) -> str:
        kind = type(value)
        if kind is Slot:
            return f"s[c[i+{int(value.index)}]][0]"
        if kind is Number:
            return f"c[i+{n + int(value.index)}]"
        if kind is list and _has_marks(value):
            return "[" + ", ".join(map(text, value)) + "]"
        name = f"k{len(constants)}"
        constants[name] = device if kind is DeviceSlot else value
        return name

    assert names is None or kwargs.keys() <= names
    call = ", ".join([*map(text, args), *(f"{k}={text(v)}" for k, v in kwargs.items())])
    first = n + plan.numbers
    if len(plan.results) == 1 and new:
        body = f"s[c[i+{first}]] = [f({call})]"
    elif not new:
        body = f"f({call})"
    else:
        stores = "; ".join(f"s[o+{j}] = [r[{k}]]" for j, k in enumerate(new))
        body = f"r = f({call}); o = c[i+{first}]; {stores}"
    source = f"def run(s, c, i):\n    {body}\n    return i + {first + bool(new)}\n"
    exec(_compiled(source), constants)  # noqa: S102  (numbers and checked names only)
    return constants["run"]  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType:
    """Plans that differ in their values only, as in sizes, share the code: compiling takes most of their time."""
    return compile(source, "<dtorch plan>", "exec")


def _has_marks(values: list[Any]) -> bool:
    return any(type(v) in (Slot, Number, DeviceSlot) or (type(v) is list and _has_marks(v)) for v in values)
