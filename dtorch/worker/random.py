"""Random operators: the same numbers for the same seed, however the tensor is placed.

Every worker draws the whole global tensor and keeps its pieces. That costs a temporary of the global size and gives
torch's own bits on a CPU mesh; nothing else does, since torch's CPU generators are sequential.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.core.pieces import piece_of
from dtorch.core.spec import TensorSpec
from dtorch.protocol.plans import WirePlan
from dtorch.protocol.values import DeviceSlot, GeneratorSlot, Number, Slot


def draw(
    plan: WirePlan,
    op: Any,
    here: Sequence[int],
    wanted: tuple[TensorSpec, ...],
    inputs: Sequence[list[torch.Tensor]],
    numbers: Sequence[Any],
    generator: torch.Generator,
    calls: Sequence[Callable[[Sequence[Any], Sequence[Any], Any], Any]],
) -> list[Any]:
    """Raw results on each local device."""
    if all(s.is_replicated for s in wanted):
        results = [r.spec for r in plan.results if r.spec is not None and r.same is None]
        if all(s.is_replicated for s in results):
            return _once(plan, here, inputs, numbers, generator, calls)
    name = op._schema.name.removeprefix("aten::")
    if name == "native_dropout":
        return _dropout(here, wanted[0], inputs[0], plan, generator)
    return _sliced(plan, op, here, wanted, inputs, numbers, generator)


def _once(
    plan: WirePlan,
    here: Sequence[int],
    inputs: Sequence[list[torch.Tensor]],
    numbers: Sequence[Any],
    generator: torch.Generator,
    calls: Sequence[Callable[[Sequence[Any], Sequence[Any], Any], Any]],
) -> list[Any]:
    """Replicated: every local device repeats the draw from the same state."""
    state = generator.get_state() if len(here) > 1 else None
    out = []
    for k in range(len(here)):
        if k and state is not None:
            generator.set_state(state)
        with _default_generator(plan, generator):
            out.append(calls[k]([x[k] for x in inputs], numbers, generator))
    return out


class _default_generator:
    """Operators without a generator argument draw from torch's default one: lend it the state, take it back.

    The default one's own state comes back afterwards: in inline mode it is the program's.
    """

    def __init__(self, plan: WirePlan, generator: torch.Generator) -> None:
        self._generator = generator
        default: Any = torch.default_generator
        if generator.device.type == "cuda":
            default = torch.cuda.default_generators[generator.device.index or 0]
        self._default = None if "generator" in plan.kwargs else default

    def __enter__(self) -> None:
        if self._default is not None:
            self._before = self._default.get_state()
            self._default.set_state(self._generator.get_state())

    def __exit__(self, *exc: object) -> None:
        if self._default is not None:
            self._generator.set_state(self._default.get_state())
            self._default.set_state(self._before)


def _dropout(
    here: Sequence[int], spec: TensorSpec, local: list[torch.Tensor], plan: WirePlan, generator: torch.Generator
) -> list[Any]:
    p, train = float(plan.args[1]), plan.args[2] is not False
    if not train or p == 0:
        return [(x.clone(), torch.ones_like(x, dtype=torch.bool)) for x in local]
    whole = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=generator.device)
    with _default_generator(plan, generator):
        keep = torch.ops.aten.native_dropout.default(whole.zero_(), p, True)[1]
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    out = []
    for position, x in zip(here, local, strict=True):
        mask = piece_of(keep, spec, position).contiguous()
        out.append((x.mul(mask).mul_(scale), mask))
    return out


def _sliced(
    plan: WirePlan,
    op: Any,
    here: Sequence[int],
    wanted: tuple[TensorSpec, ...],
    inputs: Sequence[list[torch.Tensor]],
    numbers: Sequence[Any],
    generator: torch.Generator,
) -> list[Any]:
    """Draw for the global shape with stand-ins for the tensors, then keep the pieces.

    Stand-ins have the global strides: torch draws in the order of memory.
    """
    stand_ins = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=generator.device) for s in wanted]
    args = [stand_ins[a.index] if type(a) is Slot else a for a in plan.args]
    kwargs = dict(plan.kwargs)
    from_wire = _Filler(numbers, generator)
    with _default_generator(plan, generator):
        full = op(*map(from_wire, args), **{k: from_wire(v) for k, v in kwargs.items()})
    spec = next(r.spec for r in plan.results if r.spec is not None)
    out = []
    for k, position in enumerate(here):
        piece = piece_of(full, spec, position)
        if plan.results[0].same is not None:
            out.append(inputs[plan.results[0].same][k].copy_(piece))
        else:
            out.append(piece.clone())
    return out


class _Filler:
    def __init__(self, numbers: Sequence[Any], generator: torch.Generator) -> None:
        self._numbers, self._generator = numbers, generator

    def __call__(self, value: Any) -> Any:
        if type(value) is Number:
            return self._numbers[value.index]
        if type(value) is GeneratorSlot:
            return self._generator
        if type(value) is DeviceSlot:
            return self._generator.device
        return value
