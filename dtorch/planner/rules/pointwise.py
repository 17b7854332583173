"""Operators that work element by element, with broadcasting; also their foreach forms on lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.core.spec import TensorSpec
from dtorch.planner.call import Call, draws
from dtorch.planner.rule import Labels, NoRule, Rule, RuleFunction, replicated, rule

# Element by element without carrying torch's pointwise tag (2.13).
_UNTAGGED = frozenset(
    f"aten.{n}"
    for n in [
        "clone", "_to_copy", "detach", "alias", "copy", "fill", "zero", "lift_fresh", "lift", "zeros_like",
        "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "masked_fill", "where",
        "native_dropout_backward", "threshold_backward", "gelu_backward", "silu_backward", "sigmoid_backward",
        "tanh_backward", "hardtanh_backward", "leaky_relu_backward", "elu_backward", "softplus_backward",
        "softshrink_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish_backward",
        "mish_backward", "logit_backward", "celu", "relu", "relu6", "view_as_real_copy", "nan_to_num", "isfinite",
        "isinf", "isnan", "isreal", "isposinf", "isneginf", "isclose", "real", "imag", "conj_physical",
        "_conj_physical", "resolve_conj", "resolve_neg", "_neg_view_copy", "contiguous", "is_pinned",
        "_fused_dropout", "bernoulli", "normal", "uniform", "random", "exponential", "cauchy", "geometric",
        "log_normal", "native_dropout", "dropout", "_conj", "_neg_view", "log_sigmoid_forward",
        "log_sigmoid_backward", "special_xlog1py", "special_zeta", "polygamma", "igamma", "igammac", "nextafter",
        "ldexp", "frexp", "heaviside", "hypot", "float_power", "fmod", "remainder", "gcd", "lcm", "logaddexp",
        "logaddexp2", "copysign", "xlogy", "lerp", "addcmul", "addcdiv", "clamp", "clip", "clamp_min", "clamp_max",
        "bitwise_left_shift", "bitwise_right_shift", "complex", "polar", "fake_quantize_per_tensor_affine",
        "prelu", "_prelu_kernel", "_prelu_kernel_backward", "rrelu_with_noise", "rrelu", "hardshrink",
        "softshrink", "threshold", "sgn", "sign", "angle", "view_as_complex_copy", "alias_copy", "floor_divide",
        "rsub", "hardswish",
    ]
)  # fmt: skip

# Linear in these slots together: sum(f(x_i)) == f(sum(x_i)).
_LINEAR: dict[str, tuple[frozenset[int], ...]] = {
    **{
        f"aten.{n}": (frozenset({0}),)
        for n in (
            "clone",
            "detach",
            "alias",
            "neg",
            "lift_fresh",
            "real",
            "imag",
            "_conj",
            "conj_physical",
            "contiguous",
        )
    },
    "aten.mul": (frozenset({0}), frozenset({1})),
    "aten.div": (frozenset({0}),),
    "aten.add": (frozenset({0, 1}),),
    "aten.sub": (frozenset({0, 1}),),
    "aten.rsub": (frozenset({0, 1}),),
    "aten._to_copy": (frozenset({0}),),
    "aten.zero": (frozenset({0}),),
    "aten.copy": (frozenset({0, 1}),),
    "aten.native_dropout_backward": (frozenset({0}),),
    "aten.threshold_backward": (frozenset({0}),),
    "aten.where": (frozenset({1, 2}),),
    "aten.masked_fill": (),
}


def _draws_for_shape(call: Call) -> bool:
    """Whether a random operator draws one number for each element without looking at values of its inputs.

    Each device then draws them all and keeps its own part, so that the values do not depend on the placement.
    """
    name = call.func._schema.name.removeprefix("aten::")
    if len(call.specs) != 1:
        return False
    return name.endswith("_like") or name in (
        "native_dropout", "uniform_", "normal_", "random_", "exponential_", "cauchy_", "geometric_", "log_normal_",
        "uniform", "random", "exponential", "cauchy", "geometric", "log_normal",
    ) or (name in ("bernoulli_", "bernoulli") and call.func._overloadname in ("float", "p"))  # fmt: skip


def broadcast_labels(shape: Sequence[int], out: Sequence[int], prefix: Any = "d") -> Labels:
    """Labels of a tensor that broadcasts to ``out``: the result's dimension, ``None`` where it is stretched."""
    shift = len(out) - len(shape)
    return tuple((prefix, d + shift) if n == out[d + shift] else None for d, n in enumerate(shape))


def pointwise(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every tensor broadcasts to the shape of the results."""
    random = draws(call)
    if random and not _draws_for_shape(call):
        whole = replicated(call, outs)
        return Rule(whole.inputs, whole.outputs, kernel="random")
    shape = torch.broadcast_shapes(*(s.shape for s in call.specs), *(o.shape for o in outs))
    inputs = [broadcast_labels(s.shape, shape) for s in call.specs]
    outputs = [broadcast_labels(o.shape, shape) for o in outs]
    if any(o.shape != shape for o in outs):
        raise NoRule(f"{call.name}: a result is smaller than the broadcast shape")
    linear = tuple(s for s in _LINEAR.get(call.name, ()) if all(i < len(call.specs) for i in s))
    if call.get("rounding_mode") is not None:
        linear = ()
    if call.name == "aten.copy" and len(call.specs) == 2 and call.specs[0].dtype != call.specs[1].dtype:
        linear = ()
    if call.name in ("aten._to_copy",) and not _widens(call.specs[0].dtype, outs[0].dtype):
        linear = ()
    unused = frozenset({0} if call.name.endswith("_like") else ())
    return Rule(inputs, outputs, linear=linear, kernel="random" if random else None, unused=unused)


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps sums exact enough: not to bool or integers from floats, not to fewer bits."""
    if target == torch.bool or source == torch.bool:
        return False
    if source.is_floating_point or source.is_complex:
        return (target.is_floating_point or target.is_complex) and target.itemsize >= source.itemsize
    return True


def default_rule(call: Call, outs: Sequence[Any]) -> RuleFunction | None:
    """The element-by-element rule where torch's tag or our list says so, or ``None``."""
    if call.name.startswith(("aten._foreach_", "aten._fused_adam", "aten._fused_sgd", "aten._fused_adagrad")):
        return foreach
    if (
        call.specs
        and outs
        and (torch.Tag.pointwise in call.func.tags or call.name in _UNTAGGED or _base_is_pointwise(call))
    ):
        return pointwise
    return None


def _base_is_pointwise(call: Call) -> bool:
    """In-place forms: the tag stands on the functional overload only, here and there."""
    packet = getattr(torch.ops.aten, call.name.removeprefix("aten."), None)
    overload = getattr(packet, call.func._overloadname, None) if packet is not None else None
    return overload is not None and torch.Tag.pointwise in overload.tags


_REDUCING_FOREACH = ("aten._foreach_norm", "aten._foreach_max", "aten._foreach_powsum")


@rule("aten._foreach_norm", "aten._foreach_max")
def foreach_reduce(call: Call, outs: Sequence[Any]) -> Rule:
    """One number a tensor; over cut tensors the parts are gathered."""
    return Rule([(None,) * s.ndim for s in call.specs], [(None,) * len(o.shape) for o in outs])


def foreach(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Lists of tensors: entry i of every list belongs together, a single tensor belongs to all."""
    lists = [s for s in call.slots.values() if isinstance(s, list)]
    length = len(lists[0])
    if any(len(s) != length for s in lists):
        raise NoRule(f"{call.name}: lists of different lengths")
    inputs: list[Labels] = [()] * len(call.specs)
    for slots in lists:
        for i, slot in enumerate(slots):
            if slot is None:
                raise NoRule(f"{call.name}: a list has a missing entry")
            shape = _entry_shape(call.specs, lists, i)
            inputs[slot] = broadcast_labels(call.specs[slot].shape, shape, prefix=i)
    for slot in (s for s in call.slots.values() if isinstance(s, int)):
        inputs[slot] = (None,) * call.specs[slot].ndim
    outputs = [broadcast_labels(o.shape, o.shape, prefix=i % length) for i, o in enumerate(outs)]
    return Rule(inputs, outputs, entries=_entries(lists, len(outs)))


def _entries(lists: Sequence[list[int | None]], results: int) -> list[tuple[list[int], list[int]]]:
    """Slots and results of each entry."""
    length = len(lists[0])
    return [
        ([s for group in lists if (s := group[i]) is not None], list(range(i, results, length))) for i in range(length)
    ]


def _entry_shape(specs: Sequence[TensorSpec], lists: Sequence[list[int | None]], i: int) -> tuple[int, ...]:
    slots = (group[i] for group in lists)
    return tuple(torch.broadcast_shapes(*(specs[s].shape for s in slots if s is not None)))
