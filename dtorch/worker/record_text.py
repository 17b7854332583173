"""The text of a compiled record: fixed pieces and numbers only; whatever came over the wire enters as a named value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dtorch.protocol.records import slots_in
from dtorch.protocol.values import DeviceSlot, Number, Slot
from dtorch.worker.program import Program

if TYPE_CHECKING:
    from dtorch.worker.record import Step

FILE = "<dtorch record>"
Locals = list[torch.Tensor]
Run = Callable[..., None]


class Text:
    """The lines of a compiled record, and the values that they name.

    Variable ``v`` on the ``d``-th device here is ``v7_0``. Of each line it is known which step it belongs to, and on
    which device, so that a failure costs nothing until it happens.
    """

    def __init__(
        self, parts: Callable[[int], int], count: int, parameters: str = "s, c, i, o, tick=None, now=None"
    ) -> None:
        self._parts, self._count = parts, count
        self._lines = [f"def run({parameters}):"]
        self._steps: list[tuple[int, int]] = [(-1, 0)]
        self._names: dict[str, Any] = {}
        self._same: dict[int, str] = {}

    def _name(self, variable: int, device: int) -> str:
        return f"v{int(variable)}_{int(device)}"

    def _all(self, variable: int) -> str:
        """A list of the parts of a variable, to be read or assigned."""
        return "[" + ", ".join(self._name(variable, d) for d in range(self._parts(variable))) + "]"

    def _line(self, text: str, step: int = -1, device: int = 0) -> None:
        self._lines.append("    " + text)
        self._steps.append((step, device))

    def _value(self, value: Any) -> str:
        """A name for a value."""
        if value is None or value is True or value is False:
            return str(value)
        name = self._same.get(id(value))
        if name is None:
            name = self._same[id(value)] = f"k{len(self._names)}"
            self._names[name] = value
        return name

    def load(self, variable: int, place: str) -> None:
        """Take a variable from the store."""
        if self._parts(variable) == 1:
            self._line(f"{self._name(variable, 0)} = {place}[0]")
        elif self._parts(variable):
            self._line(f"{self._all(variable)} = {place}")

    def constant(self, variable: int, parts: Locals) -> None:
        """Name a variable's fixed value."""
        self._names.update((self._name(variable, d), t) for d, t in enumerate(parts))

    def keep(self, variable: int, place: str, k: int) -> None:
        """Put a variable into the store, after step ``k - 1``."""
        if self._parts(variable):
            self._line(f"{place} = {self._all(variable)}", k)

    def give(self, variables: Sequence[int]) -> None:
        """Return the variables on the one device."""
        self._line("return (" + "".join(f"{self._name(v, 0)}, " for v in variables) + ")")

    def call(self, k: int, step: Step, function: Callable[..., Any], ended: list[int]) -> None:
        """A step on all devices at once."""
        outs = ", ".join(self._all(v) if self._parts(v) else f"unused_{j}" for j, v in enumerate(step.outs))
        given = ", ".join(self._all(v) for v in step.inputs)
        self._line(f"[{outs}] = {self._value(function)}([{given}])", k)
        self._release(ended, k)

    def plain(self, k: int, step: Step, program: Program, device: torch.device, ended: list[int]) -> None:
        """A step that is one call on each device."""
        count = len(program.here)
        for d in range(count):
            target, args, kwargs = _cheaper(program, d, *program.call_on(d))
            call = f"{self._value(target)}({self._arguments(step, args, kwargs, device, d)})"
            mender = program.mender(d)
            if mender is not None:
                call = f"{self._value(mender)}({call})"
            alone = len(program.plan.results) == 1 and mender is None
            if step.outs and alone:
                call = f"{self._name(step.outs[0], d)} = {call}"
            elif step.outs:
                wanted = dict(zip(program.new, step.outs, strict=True))
                targets = [
                    self._name(wanted[r], d) if r in wanted else "unused" for r in range(len(program.plan.results))
                ]
                call = f"[{', '.join(targets)}] = {call}"
            self._line(call, k, d)
        self._release(ended, k)

    def _arguments(self, step: Step, args: list[Any], kwargs: dict[str, Any], device: torch.device, d: int) -> str:
        def text(value: Any) -> str:
            kind = type(value)
            if kind is Slot:
                return self._name(step.inputs[value.index], d)
            if kind is Number:
                return self._value(step.numbers[value.index])
            if kind is list and next(slots_in(value), None) is not None:
                return "[" + ", ".join(map(text, value)) + "]"
            return self._value(_filled(value, step.numbers, device))

        named = (f"{name}={text(value)}" for name, value in kwargs.items())
        return ", ".join([*map(text, args), *named])

    def _release(self, ended: list[int], k: int) -> None:
        names = [self._name(v, d) for v in ended for d in range(self._parts(v))]
        if names:
            self._lines[-1] += f"; del {', '.join(names)}"

    def fused(self, k: int, inputs: list[int], outs: list[int], function: Callable[..., Any], ended: list[int]) -> None:
        """Steps from ``k`` on, on the one device here, as one function of ``part_of``."""
        given = ", ".join(self._name(v, 0) for v in inputs)
        self._line(f"[{', '.join(self._name(v, 0) for v in outs)}] = {self._value(function)}({given})", k)
        self._release(ended, k)

    def compile(self, measured: bool = False) -> Run:
        """The function ``(store, commands, index of the operands, id of the first result)``.

        Args:
            measured: it takes ``tick`` and ``now`` as well, and calls ``tick(now())`` after each step.
        """
        if len(self._lines) == 1:
            self._line("return")
        lines = self._lines
        if measured:
            ends = zip(self._steps, [*self._steps[1:], (-1, 0)], strict=True)
            ticks = [k >= 0 and after != k and k < self._count for (k, _), (after, _) in ends]
            lines = [line + "; tick(now())" * tick for line, tick in zip(lines, ticks, strict=True)]
        source = "\n".join(lines) + "\n"
        exec(compile(source, FILE, "exec"), self._names)  # noqa: S102  (numbers and checked names only)
        return self._names["run"]  # type: ignore[no-any-return]

    def where(self, error: Exception) -> tuple[int, int, dict[int, Locals]]:
        """Step and device of the line that failed, and the variables' values at that time."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        assert trace is not None, "it came from the compiled function"
        step, device = self._steps[trace.tb_lineno - 1]
        found: dict[int, dict[int, torch.Tensor]] = {}
        for name, value in trace.tb_frame.f_locals.items():
            head, _, tail = name.partition("_")
            if head[0] == "v" and tail.isdigit():
                found.setdefault(int(head[1:]), {})[int(tail)] = value
        whole = {v: [parts[d] for d in sorted(parts)] for v, parts in found.items() if len(parts) == self._parts(v)}
        return step, device, whole


def part_of(
    steps: Sequence[tuple[Step, Program]], inputs: Sequence[int], outs: Sequence[int], device: torch.device
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Some steps on the one device here as a function: values of the inputs to those of the outs."""
    text = Text(lambda v: 1, len(steps), ", ".join(f"v{int(v)}_0" for v in inputs))
    for k, (step, program) in enumerate(steps):
        text.plain(k, step, program, device, [])
    text.give(outs)
    return text.compile()  # type: ignore[return-value]


def _cheaper(
    program: Program, d: int, target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
    """A cheaper call of the same effect, where the sizes are known."""
    plan = program.plan
    if plan.op == "aten::slice.Tensor" and plan.kernel is None and not kwargs and (args[4:] or [1])[0] == 1:
        out, start = plan.results[0].spec, (args[2:] or [0])[0] or 0
        dim = (args[1:] or [0])[0]
        if out is not None and type(start) is int and start >= 0 and type(dim) is int:
            size = out.local_shape(program.here[d])[dim]
            if size:
                return torch.narrow, [args[0], dim, start, size], {}
    return target, args, kwargs


def _filled(value: Any, numbers: Sequence[Any], device: torch.device) -> Any:
    """An argument without tensors, its marks replaced."""
    kind = type(value)
    if kind is Number:
        return numbers[value.index]
    if kind is DeviceSlot:
        return device
    return [_filled(v, numbers, device) for v in value] if kind is list else value

