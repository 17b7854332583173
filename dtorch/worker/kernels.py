"""Operators with a twist: what a device runs where the plain operator on its piece would be wrong.

A kernel gets the context of the call on one device (pieces and global shapes) and the operator's own arguments, and
returns what the operator would.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dtorch.core.pieces import piece_of
from dtorch.core.spec import Span, TensorSpec


@dataclass(frozen=True)
class Context:
    """One device's view of a call.

    Attributes:
        op: the operator.
        position: position of the device in its mesh.
        inputs: spec of each tensor slot after its moves.
        outputs: spec of each result.
    """

    op: Any
    position: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input_span(self, slot: int, dim: int) -> Span:
        """The part of a dimension of input ``slot`` held here; rules that ask for it do not cut it in segments."""
        (span,) = self.inputs[slot].spans(self.position)[dim]
        return span

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""
        return self.outputs[index].local_shape(self.position)

    def is_first(self) -> bool:
        """Whether this device is the first along every axis on which the first result is Partial."""
        coordinate = self.outputs[0].mesh.coordinates[self.position]
        return all(c == 0 for c, p in zip(coordinate, self.outputs[0].placements, strict=True) if p.is_partial())

    @cached_property
    def is_empty(self) -> bool:
        """Whether this device holds nothing of some cut dimension."""
        return any(
            whole and not here
            for s in self.inputs
            for whole, here in zip(s.shape, s.local_shape(self.position), strict=True)
        )

    def nothing(self, device: torch.device) -> Any:
        """Results of an empty piece: empty where a result is cut, zeros to add where it is a sum."""
        out = [torch.zeros(self.output_shape(i), dtype=s.dtype, device=device) for i, s in enumerate(self.outputs)]
        return out[0] if len(self.op._schema.returns) == 1 else out

    def index(self, name: str) -> int:
        """Place of an argument in the schema; its slot as well when only tensors come before it and none is missing."""
        return next(i for i, a in enumerate(self.op._schema.arguments) if a.name == name)

    def argument(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """The value of an argument, given or default."""
        i = self.index(name)
        return args[i] if i < len(args) else kwargs.get(name, self.op._schema.arguments[i].default_value)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], **changes: Any) -> Any:
        """The operator, or what stands in for it, with some arguments replaced."""
        positional, named = list(args), dict(kwargs)
        for name, value in changes.items():
            i = self.index(name)
            if i < len(positional):
                positional[i] = value
            else:
                named[name] = value
        function = STAND_INS.get(f"{self.op._schema.name}.{self.op._overloadname}")
        return self.op(*positional, **named) if function is None else function(self, *positional, **named)


Kernel = Callable[..., Any]
KERNELS: dict[str, Kernel] = {}

# By operator, ``aten::name.overload``: what runs instead of it, cut or not, where no other kernel is asked for.
STAND_INS: dict[str, Kernel] = {}


def kernel(f: Kernel) -> Kernel:
    """Register a kernel under its function's name."""
    KERNELS[f.__name__] = f
    return f


def stand_in(*operators: str) -> Callable[[Kernel], Kernel]:
    """Register what runs instead of operators (``name.overload``) that torch lacks on some devices, or that give
    other shapes there."""

    def register(f: Kernel) -> Kernel:
        for name in operators:
            STAND_INS[f"aten::{name}"] = f
        return f

    return register


@kernel
def view_result(ctx: Context, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A view of the local piece in the shape of the local result; arguments speak of global sizes."""
    return x.view(ctx.output_shape())


@kernel
def add_once(ctx: Context, *args: Any, **kwargs: Any) -> torch.Tensor:
    """linear, addmm and relatives over a piece of the inner dimension: only one device adds the bias."""
    name = ctx.op._schema.name
    if name == "aten::linear":
        x, weight, bias = args
        return torch.ops.aten.linear.default(x, weight, bias if ctx.is_first() else None)  # type: ignore[no-any-return]
    if not ctx.is_first():
        kwargs = {**kwargs, "beta": 0}
    return ctx.op(*args, **kwargs)  # type: ignore[no-any-return]


@kernel
def mean_piece(ctx: Context, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The local sum divided by the global count; the Partial sum over the devices is the mean."""
    dtype = kwargs.get("dtype") or x.dtype
    dims = args[0] if args and args[0] else None
    keepdim = bool(args[1]) if len(args) > 1 else bool(kwargs.get("keepdim", False))
    shape = ctx.inputs[0].shape
    dims = list(range(len(shape))) if dims is None else [d % len(shape) for d in dims]
    count = 1
    for d in dims:
        count *= shape[d]
    # Half precision sums are kept in single precision until the division, as torch's own mean does.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return (torch.sum(x, dims, keepdim, dtype=wide) / count).to(dtype)


@kernel
def reduce_piece(ctx: Context, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An extremum over a piece that may be empty: then the value that changes nothing."""
    if x.numel():
        return ctx.op(x, *args, **kwargs)  # type: ignore[no-any-return]
    largest = ctx.op._schema.name.endswith("min")
    if x.dtype == torch.bool:
        worst: Any = largest
    elif x.dtype.is_floating_point:
        worst = float("inf") if largest else float("-inf")
    else:
        worst = torch.iinfo(x.dtype).max if largest else torch.iinfo(x.dtype).min
    return torch.full(ctx.output_shape(), worst, dtype=x.dtype, device=x.device)


@kernel
def cut(ctx: Context, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A factory whose values depend on the global index: make it whole, keep the piece."""
    return piece_of(ctx.op(*args, **kwargs), ctx.outputs[0], ctx.position).contiguous()


@kernel
def empty_piece(ctx: Context, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A piece of an uninitialised tensor; it gets the global tensor's memory order afterwards."""
    return torch.empty(ctx.output_shape(), **kwargs)
