"""Convolutions, and rearrangements of space around them: windows as columns, pixel and channel shuffles, padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtorch.core.steps import ROWS
from dtorch.planner.call import Call
from dtorch.planner.rule import Label, Labels, NoRule, Rule, rule
from dtorch.planner.rules.named import UNLESS_EMPTY, leading, slots, sums, wanted


class _Sides:
    """Labels of the tensors of a convolution of samples ``n``, input channels ``i`` and output channels ``o``.

    With several groups both kinds of channels are cut together, between groups: one label ``g``.
    """

    def __init__(self, call: Call, weight: tuple[int, ...], data: tuple[int, ...], result: tuple[int, ...]) -> None:
        if len(data) != len(weight):
            raise NoRule("a convolution without a batch dimension")
        grouped = call["groups"] > 1
        i, o = ("g", "g") if grouped else ("i", "o")
        self.units: dict[Label, int] = {"g": call["groups"]} if grouped else {}
        space = self._space(call, weight[2:], data[2:], result[2:])
        holes = (None,) * len(space)
        self.data: Labels = ("n", i, *space)
        self.result: Labels = ("n", o, *space)
        self.bias: Labels = (o,)
        # The second dimension of a grouped weight counts channels within one group.
        first, second = (i, o) if call["transposed"] else (o, i)
        self.weight: Labels = (first, None if grouped else second, *holes)

    def _space(self, call: Call, kernel: Sequence[int], data: Sequence[int], result: Sequence[int]) -> Labels:
        """Space is independent where windows neither overlap nor meet padding, as in patch embeddings."""
        labels: list[Label] = []
        for d, (k, a, b) in enumerate(zip(kernel, data, result, strict=True)):
            stride, padding, dilation = (_at(call[x], d) for x in ("stride", "padding", "dilation"))
            windows, covered = (a, b) if call["transposed"] else (b, a)
            apart = dilation * (k - 1) + 1 <= stride and padding == 0 and covered == windows * stride
            labels.append(("s", d) if apart else None)
            if apart and stride > 1:
                self.units["s", d] = windows
        return tuple(labels)


def _at(values: Sequence[int], d: int) -> int:
    return values[d] if len(values) > 1 else values[0]


@rule("aten.convolution")
def convolution(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Cut input channels leave partial sums, to which only the first device adds the bias."""
    side = _Sides(call, call.spec("weight").shape, call.first.shape, tuple(outs[0].shape))
    inputs = slots(call, input=side.data, weight=side.weight, bias=side.bias)
    halo = _halo(call, call.spec("weight").shape[2:])
    return Rule(
        inputs, [side.result], reduce=sums(("i",)), units=side.units, kernel="convolution_piece", halo=halo,
        ring="halo_convolution",
    )  # fmt: skip


def _halo(call: Call, window: Sequence[int]) -> tuple[int, int] | None:
    """The first dimension of space, when an index of the result sees as many of the input before as after it."""
    stride, padding, dilation = (_at(call[x], 0) for x in ("stride", "padding", "dilation"))
    if call["transposed"] or stride != 1 or not padding or 2 * padding != dilation * (window[0] - 1):
        return None
    return ROWS, padding


@rule("aten.convolution_backward")
def convolution_backward(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Each gradient is a sum over what its tensor lacks of samples, space and the channels of the other side."""
    side = _Sides(call, call.spec("weight").shape, call.spec("input").shape, call.spec("grad_output").shape)
    inputs = slots(call, grad_output=side.result, input=side.data, weight=side.weight)
    outputs = wanted(call, [side.data, side.weight, side.bias])
    reduce = sums((*side.data, *side.result))
    return Rule(inputs, outputs, reduce=reduce, units=side.units, kernel="convolution_backward_piece")


@rule("aten.conv_tbc")
def conv_tbc(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """A convolution over (time, batch, channels)."""
    inputs: list[Labels] = [(None, "b", None), (None, None, "o"), ("o",)]
    return Rule(inputs, [(None, "b", "o")], kernel=UNLESS_EMPTY)


@rule("aten.im2col")
def im2col(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Windows of (..., channels, height, width) as columns (..., channels * window, windows)."""
    batch = tuple(range(call.first.ndim - 3))
    labels: Labels = (*batch, "c", None)
    linear = (frozenset({0}),)
    return Rule([(*labels, None)], [labels], linear=linear, units={"c": call.first.shape[-3]}, kernel=UNLESS_EMPTY)


@rule("aten.col2im")
def col2im(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Columns added up to (..., channels, height, width)."""
    batch = tuple(range(call.first.ndim - 2))
    labels: Labels = (*batch, "c", None)
    linear = (frozenset({0}),)
    return Rule([labels], [(*labels, None)], linear=linear, units={"c": outs[0].shape[-3]}, kernel=UNLESS_EMPTY)


@rule("aten.pixel_shuffle", "aten.pixel_unshuffle")
def pixel_shuffle(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Channels and space trade a factor; each is cut between whole units of the smaller side."""
    batch = tuple(range(call.first.ndim - 3))
    labels: Labels = (*batch, "c", "h", "w")
    units = {x: min(call.first.shape[d], outs[0].shape[d]) for x, d in (("c", -3), ("h", -2), ("w", -1))}
    return Rule([labels], [labels], linear=(frozenset({0}),), units=units, kernel=UNLESS_EMPTY)


@rule("aten.channel_shuffle", "aten.native_channel_shuffle")
def channel_shuffle(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Every channel may go anywhere: channels are whole."""
    labels = tuple(None if d == 1 else d for d in range(call.first.ndim))
    return Rule([labels], [labels], linear=(frozenset({0}),), kernel=UNLESS_EMPTY)


def _padded(ndim: int, pad: Sequence[int]) -> Labels:
    """Labels of the dimensions that are not padded; ``pad`` lists (before, after) from the last dimension on."""
    padded = {ndim - 1 - k // 2 for k, n in enumerate(pad) if n}
    return tuple(None if d in padded else d for d in range(ndim))


@rule("aten.constant_pad_nd")
def constant_pad(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """Padded dimensions are whole."""
    labels = _padded(call.first.ndim, call["pad"])
    return Rule([labels], [labels])


_MIRRORS = [f"aten.{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]


@rule(*_MIRRORS, *(f"{name}_backward" for name in _MIRRORS))
def mirror_pad(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """The border is repeated or mirrored: as constant padding, and linear. Backward also gets the padded tensor."""
    labels = _padded(call.first.ndim, call["padding"])
    return Rule([labels] * len(call.specs), [labels], linear=(frozenset({0}),), kernel=UNLESS_EMPTY)


@rule("aten.affine_grid_generator")
def affine_grid(call: Call, outs: Sequence[torch.Tensor]) -> Rule:
    """(n, 2, 3) or (n, 3, 4) to (n, *space, 2 or 3); the size names the samples as well."""
    labels = leading(call.first.ndim, call.first.ndim - 1)
    return Rule([labels], [leading(outs[0].ndim, outs[0].ndim - 1)], kernel="affine_grid_piece")
