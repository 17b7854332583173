"""Shapes, strides and dtypes of results, by running the operator on meta tensors."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.core.spec import TensorSpec, contiguous_strides
from dtorch.core.torch_private import below_python_dispatch
from dtorch.planner.call import Call
from dtorch.planner.missing_meta import SHAPES


class NoMeta(Exception):
    """The results of this call cannot be predicted; only running it tells."""


def predict(call: Call) -> tuple[Any, list[torch.Tensor]]:
    """Results of the call on meta tensors.

    Returns:
        The raw result (tensors, numbers, lists, ``None``) and the meta tensor of each slot.

    Raises:
        NoMeta: the operator has no meta implementation or its results depend on data.
        Exception: what torch itself raises for wrong arguments (shapes, dtypes).
    """
    known = SHAPES[call.name](call) if call.name in SHAPES else None
    if known is not None:
        return known, []
    if _depends_on_data(call) or call.name in _UNRELIABLE:
        raise NoMeta(str(call.func))
    if call.name == "aten._grouped_mm":
        return _grouped_mm(call), []
    device = "cpu" if _ambiguous(call) else "meta"
    made: list[torch.Tensor] = []

    def convert(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            made.append(_like(value, device))
            return made[-1]
        if isinstance(value, (list, tuple)):
            return [convert(v) for v in value]
        if isinstance(value, torch.device):
            return torch.device(device)
        if isinstance(value, torch.Generator):
            return None
        return value

    with below_python_dispatch(), torch.inference_mode(False), torch.no_grad():
        args = tuple(convert(a) for a in call.args)
        kwargs = {k: convert(v) for k, v in call.kwargs.items()}
        try:
            return _corrected(call, call.func(*args, **kwargs)), made
        except NotImplementedError as e:
            raise NoMeta(str(call.func)) from e


def _ambiguous(call: Call) -> bool:
    """Whether strides must be asked from the CPU implementation.

    For dimensions of size one, meta implementations of element-by-element operators invent other strides than real
    ones, and kernels read the memory format, and with it the order of their sums, off such strides.
    """
    if call.name in _OWN_STRIDES:
        return call.first.numel > 0 and (call.name in _FFT or any(not _row_major(s) for s in call.specs))
    if torch.Tag.pointwise not in call.func.tags and call.name not in ("aten._to_copy", "aten.empty_like", "aten.zeros_like"):
        return False
    return any(1 in s.shape and s.numel and not _row_major(s) for s in call.specs)


# Light operators whose CPU kernels order the memory of their results otherwise than their meta implementations.
_FFT = frozenset({"aten._fft_r2c", "aten._fft_c2r", "aten._fft_c2c"})
_OWN_STRIDES = _FFT | {
    "aten.pixel_shuffle", "aten.channel_shuffle", "aten.native_channel_shuffle", "aten.reflection_pad2d",
    "aten.reflection_pad3d", "aten.replication_pad2d", "aten.replication_pad3d", "aten.max_unpool2d",
    "aten.log_sigmoid_forward", "aten.native_dropout_backward",
}  # fmt: skip


def _like(spec: TensorSpec, device: str) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)


def _row_major(spec: TensorSpec) -> bool:
    return spec.stride == contiguous_strides(spec.shape)


def _grouped_mm(call: Call) -> torch.Tensor:
    """torch's meta implementation takes bfloat16 only; shapes as in torch/_meta_registrations.py, rows dense."""
    a, b = call.spec("self").shape, call.spec("mat2").shape
    if len(a) == 2 and len(b) == 2:
        shape: tuple[int, ...] = (call.spec("offs").shape[0], a[0], b[1])
    elif len(a) == 2:
        shape = (a[0], b[2])
    elif len(b) == 2:
        shape = (a[1], b[1])
    else:
        shape = (a[0], a[1], b[2])
    return torch.empty(shape, dtype=call.get("out_dtype") or call.first.dtype, device="meta")


def _corrected(call: Call, result: Any) -> Any:
    """What meta implementations say wrongly of norms: sizes and dtypes of saved statistics, dtype of a gradient."""
    if call.name == "aten.native_group_norm_backward" and result[0] is not None:
        return result[0].to(call.spec("input").dtype), *result[1:]
    if call.name not in _NORMS:
        return result
    out, mean, deviation = result
    if "batch_norm" in call.name and not call.get("training", False):
        return out, mean.new_empty(0), deviation.new_empty(0)  # it uses the running ones
    # Meta says single precision, as on CUDA; the CPU keeps half precision unless the weight has more.
    weight = call.get("weight")
    same = weight is None or weight.dtype == call.first.dtype
    dtype = call.first.dtype if same else torch.promote_types(call.first.dtype, torch.float32)
    return out, mean.to(dtype), deviation.to(dtype)


_NORMS = frozenset(
    f"aten.{n}"
    for n in (
        "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
        "_native_batch_norm_legit_no_training",
    )
)  # fmt: skip


def _depends_on_data(call: Call) -> bool:
    """Whether values of the arguments decide about the results' shapes."""
    if call.name == "aten.index":
        return any(s.dtype in (torch.bool, torch.uint8) for s in call.specs[1:])  # masks; positions do not
    if call.name == "aten.repeat_interleave" and call.get("output_size") is not None:
        return False
    tags = call.func.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


# Operators whose meta implementation gives other shapes or dtypes than the CPU kernel (found by the sweep in
# tests/conformance); their results are asked from the workers.
_UNRELIABLE = frozenset({"aten._unique2", "aten.unique_dim", "aten.unique_consecutive", "aten.bincount"})
