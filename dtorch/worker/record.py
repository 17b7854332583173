"""A record on one worker: compiled once into straight-line Python over local variables.

Each operator is one line: it calls the fastest function for the operator, and what no later line needs is deleted at
once, so that memory peaks as it does in torch. Nothing is decoded or stored on the way. Values that depend on nothing
but the record are computed when it is compiled; what nobody uses is left out.

When a line fails, or meets a value that an earlier failure lost, the rest of the record runs operator by operator from
the variables as they stand, with the executor's own care for failures and for peers that wait.

Where the record says so, operators in a row that neither communicate nor write are one compiled function each (``fused``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.protocol import commands as C
from dtorch.protocol.records import WIDTHS, Shares, WireRecord, may_share, written_slots
from dtorch.worker.budget import Budget, local_bytes
from dtorch.worker.fused import Fused
from dtorch.worker.program import Poison, Program
from dtorch.worker.record_text import Locals, Run, Text, part_of

# Ids of a record's variables while it runs operator by operator; the client never counts so far.
_TEMPORARY = 1 << 61
# Values that depend on the record alone are kept up to this size each.
_KEPT_BYTES = 4 << 20
# Fewer operators in a row are not worth compiling.
_LEAST_FUSED = 4


class Host(Protocol):
    """What a record needs of the executor."""

    device: torch.device
    meshes: dict[int, MeshLayout]
    positions: dict[int, list[int]]
    specs: dict[int, TensorSpec]
    programs: dict[int, Program]
    store: dict[int, Any]
    generators: Any
    budget: Budget | None
    within: int | None

    def perform(
        self, program: Program, given: Sequence[Locals], numbers: list[Any], poison: Poison | None = None
    ) -> list[Locals] | Poison:
        """Results of a program."""

    def operate(self, program: Program, commands: list[Any], i: int, serial: int) -> None:
        """Run one operator on the store."""

    def failed(self, program: Program, commands: list[Any], i: int, serial: int, e: Exception) -> None:
        """Report a failed operator, and mark its results."""

    def local_parts(self, data: Any, spec: TensorSpec) -> Locals:
        """The parts here of a tensor whose bytes came from the client."""


class Lost(Exception):
    """An operator met a value that another worker has lost."""

    def __init__(self, poison: Poison) -> None:
        self.poison = poison


@dataclass
class Step:
    """One command of a record.

    Attributes:
        number: of the operator among those of the record; that of the next one if it is another command.
        program: what an operator runs; ``None`` for PUT, STATE and RESTORE, whose ``code`` and ``operands`` say all.
        inputs, numbers: variables and scalars.
        outs: variables of the new results, consecutive.
        writes: those of ``inputs`` that are written.
    """

    number: int
    program: Program | None
    inputs: list[int]
    numbers: list[Any]
    outs: list[int]
    writes: list[int] = field(default_factory=list)
    code: int = 0
    operands: list[Any] = field(default_factory=list)

    @property
    def is_pure(self) -> bool:
        """Whether it does nothing but make its results. What has none checks something."""
        plain = self.program is not None and self.program.is_plain
        return self.code == C.PUT or bool(plain and self.outs and not self.writes)

    @property
    def command(self) -> list[Any]:
        """The operands as in the stream, with temporary ids."""
        return [_TEMPORARY + v for v in self.inputs] + self.numbers + [_TEMPORARY + v for v in self.outs[:1]]


class Record:
    """Runs one record, compiled as soon as every program of it has run here before and knows its results."""

    def __init__(self, wire: WireRecord, host: Host) -> None:
        self.wire, self._host = wire, host
        self._constants: dict[int, Locals] = {}
        self._fused: dict[int, range] = {}
        self._run: Run | None = None
        self._measured: Run | None = None

    def run(self, commands: list[Any], i: int, serial: int, tick: Callable[[int], None] | None = None) -> int:
        """Run it with the operands at ``i``; returns the index after them.

        Args:
            tick: is told the time (monotonic, ns) after each of ``steps``, those after a failure left out.
        """
        end = i + self.wire.arguments
        ids, first = [*commands[i:end], *self.wire.captured], commands[end]
        if self._run is None:
            steps = self._read()
            if all(step.program is None or step.program.is_checked for step in steps):
                self._compile(steps)
            else:  # a worker that has just replaced a lost one
                self.steps, self._results, self._replaced = steps, list(self.wire.results), list(self.wire.replaced)
                self._by_operator(ids, first, serial, 0, {})
                return end + 1
        assert self._run is not None
        budget = self._host.budget
        try:
            if budget is not None:
                budget.admit_bytes(self._peak)
        except torch.OutOfMemoryError:  # not all of it fits: one by one it is seen which operator does not
            self._by_operator(ids, first, serial, 0, {})
            return end + 1
        try:
            if tick is None:
                self._run(self._host.store, commands, i, first)
            else:
                self._measured = self._measured or self._text.compile(measured=True)
                self._measured(self._host.store, commands, i, first, tick, time.monotonic_ns)
        except Exception as e:
            k, device, values = self._text.where(e)
            # Which step of several that are one function has failed is seen when they run again; they write nothing.
            again = k < 0 or (k in self._fused and tick is None)
            self._by_operator(ids, first, serial, max(k, 0), values, None if again else (e, device))
        return end + 1

    # -- reading ----------------------------------------------------------------------------------------------------
    def _read(self) -> list[Step]:
        """The commands that concern this worker."""
        host, c, steps = self._host, self.wire.commands, []
        i = number = 0
        self._mesh: dict[int, int] = {}  # of each variable
        while i < len(c):
            code = c[i]
            i += 1
            if code < C.FIRST_PLAN:
                operands = c[i : i + WIDTHS[code]]
                i += WIDTHS[code]
                made = {C.PUT: operands[:1], C.STATE: operands[1:2]}.get(code, [])
                spec = host.specs[operands[1 if code == C.PUT else 2]] if made else None
                if spec is not None:
                    self._mesh[made[0]] = spec.mesh.id
                inputs = operands[1:] if code == C.RESTORE else []
                if spec is None or host.positions[spec.mesh.id]:
                    steps.append(Step(number, None, inputs, [], made, code=code, operands=operands))
                continue
            program = host.programs[code - C.FIRST_PLAN]
            plan, n = program.plan, len(program.plan.slots)
            inputs, numbers = c[i : i + n], c[i + n : i + n + plan.numbers]
            i += program.width - 1
            outs = [c[i - 1] + k for k in range(len(program.new))]
            for v, spec in zip(inputs, plan.slots, strict=True):
                self._mesh.setdefault(v, spec.mesh.id)
            self._mesh.update(dict.fromkeys(outs, plan.mesh))
            if not program.absent:
                writes = [inputs[s] for s in written_slots(plan)]
                steps.append(Step(number, program, inputs, numbers, outs, writes))
            number += 1
        return steps

    def _parts(self, variable: int) -> int:
        """On how many devices here a variable has a part; none if nothing here uses it."""
        mesh = self._mesh.get(variable)
        return 0 if mesh is None else len(self._host.positions[mesh])

    # -- compiling --------------------------------------------------------------------------------------------------
    def _compile(self, steps: list[Step]) -> None:
        wire = self.wire
        steps, same = _with_views_once(steps)
        self._results = [same.get(v, v) for v in wire.results]
        self._replaced = [(a, same.get(v, v)) for a, v in wire.replaced]
        steps = _without_dead(steps, {*self._results, *(v for _, v in self._replaced)})
        self.steps = self._fold(steps)
        last = {v: k for k, step in enumerate(self.steps) for v in (*step.inputs, *step.outs)}
        last.update(dict.fromkeys([*self._results, *(v for _, v in self._replaced)], len(self.steps)))
        self._peak = {} if self._host.budget is None else self._most_bytes(self._host.budget, last)
        self._text = self._write(last, {})
        self._run = self._text.compile()
        if wire.fuse:
            self._fused = {span.start: span for span in self._spans()}
            self._run = self._write(last, self._fused).compile()

    def _write(self, last: dict[int, int], fused: dict[int, range]) -> Text:
        """The text of the record, with one function in place of each span of steps, by its first."""
        wire = self.wire
        text = Text(self._parts, len(self.steps))
        for v in range(1, wire.arguments + len(wire.captured) + 1):
            if v in last and v not in self._constants:
                at = f"c[i+{v - 1}]" if v <= wire.arguments else str(int(wire.captured[v - wire.arguments - 1]))
                text.load(v, f"s[{at}]")
        for v, parts in self._constants.items():
            text.constant(v, parts)
        done = 0
        for k, step in enumerate(self.steps):
            if k in fused:
                self._write_fused(text, fused[k], last)
                done = fused[k].stop
            if k < done:
                continue
            ended = [v for v in dict.fromkeys((*step.inputs, *step.outs)) if last[v] == k and v not in self._constants]
            if step.program is None:
                text.call(k, step, self._other(step), ended)
            elif step.program.is_plain:
                text.plain(k, step, step.program, self._host.device, ended)
            else:
                text.call(k, step, self._general(step, step.program), ended)
        for j, v in enumerate(self._results):
            text.keep(v, f"s[o+{j}]", len(self.steps))
        for a, b in self._replaced:
            at = f"c[i+{a - 1}]" if a <= wire.arguments else str(int(wire.captured[a - wire.arguments - 1]))
            text.keep(b, f"s[{at}]", len(self.steps))
        return text

    def _spans(self) -> list[range]:
        """Steps in a row, each one call of torch's operator on one device that writes nothing."""
        spans, start = [], 0
        for k in range(len(self.steps) + 1):
            step = self.steps[k] if k < len(self.steps) else None
            program = None if step is None else step.program
            if step is None or program is None or not step.is_pure or len(program.here) != 1 or program.has_kernel:
                if k - start >= _LEAST_FUSED:
                    spans.append(range(start, k))
                start = k + 1
        return spans

    def _write_fused(self, text: Text, span: range, last: dict[int, int]) -> None:
        steps = [(step, step.program) for step in self.steps[span.start : span.stop] if step.program is not None]
        made = {v for step, _ in steps for v in step.outs}
        used = dict.fromkeys(v for step, _ in steps for v in step.inputs)
        inputs = [v for v in used if v not in made]
        outs = [v for v in made if last[v] >= span.stop]
        ended = [v for v in inputs if last[v] < span.stop and v not in self._constants]
        text.fused(span.start, inputs, outs, Fused(part_of(steps, inputs, outs, self._host.device)), ended)

    def _most_bytes(self, budget: Budget, last: dict[int, int]) -> dict[int, int]:
        """What the record needs on each device here at most, beyond what is there before.

        Args:
            last: step after which a variable is not needed any more.
        """
        shares, made = Shares(), []
        for k, step in enumerate(self.steps):
            program = step.program
            if program is None:
                continue
            if may_share(program.plan):
                for v in step.outs:
                    for x in step.inputs:
                        shares.join(v, x)
            else:
                new = [(v, program.made[r]) for v, r in zip(step.outs, program.new, strict=True)]
                made += [(k, v, program, spec) for v, spec in new if spec is not None]
        until: dict[int, int] = {}
        for v, k in last.items():
            until[shares.root(v)] = max(until.get(shares.root(v), k), k)
        change: dict[tuple[int, int], int] = {}  # (step, device) -> bytes
        for k, v, program, spec in made:
            for device, p in zip(budget.devices(program.plan.mesh), program.here, strict=True):
                size = local_bytes(spec, p)
                change[k, device] = change.get((k, device), 0) + size
                after = until[shares.root(v)] + 1, device
                change[after] = change.get(after, 0) - size
        most: dict[int, int] = {}
        now: dict[int, int] = {}
        for (_, device), size in sorted(change.items()):
            now[device] = now.get(device, 0) + size
            most[device] = max(most.get(device, 0), now[device])
        return most

    def _fold(self, steps: list[Step]) -> list[Step]:
        """Compute what depends on the record alone, and is neither written nor given away; returns the steps left."""
        shares, written = Shares(), set()
        for step in steps:
            for v in step.outs:
                if step.program is not None and (may_share(step.program.plan) or not step.program.is_plain):
                    for x in step.inputs:
                        shares.join(v, x)
        for step in steps:
            written.update(step.writes)
        written.update(self._results)  # by whoever gets them
        roots = {shares.root(v) for v in (*written, *(v for _, v in self._replaced))}
        left = []
        for step in steps:
            known = step.is_pure and all(v in self._constants for v in step.inputs)
            if not known or any(shares.root(v) in roots for v in step.outs):
                left.append(step)
                continue
            try:
                made = self._evaluate(step)
            except Exception:  # it fails when it runs, with all that is said then
                left.append(step)
                continue
            if sum(t.nbytes for parts in made for t in parts) > _KEPT_BYTES:
                left.append(step)
            else:
                self._constants.update(zip(step.outs, made, strict=True))
        return left

    def _evaluate(self, step: Step) -> list[Locals]:
        if step.program is None:
            return self._other(step)([])
        return self._general(step, step.program)([self._constants[v] for v in step.inputs])

    def _general(self, step: Step, program: Program) -> Callable[[Sequence[Locals]], list[Locals]]:
        """The operator through the executor: with communication, random numbers, or results never checked so far."""
        host, numbers, new = self._host, step.numbers, program.new

        def call(inputs: Sequence[Locals]) -> list[Locals]:
            made = host.perform(program, inputs, numbers)
            if isinstance(made, Poison):
                raise Lost(made)
            return [made[k] for k in new]

        return call

    def _other(self, step: Step) -> Callable[[Sequence[Locals]], list[Locals]]:
        """A command that is no operator."""
        host, operands = self._host, step.operands
        if step.code == C.PUT:
            value = host.local_parts(operands[2], host.specs[operands[1]])
            return lambda inputs: [[t.clone() for t in value]]
        if step.code == C.STATE:
            count = self._parts(operands[1])
            return lambda inputs: [[host.generators.get(operands[0]).get_state().clone() for _ in range(count)]]

        def restore(inputs: Sequence[Locals]) -> list[Locals]:
            if inputs[0]:
                host.generators.get(operands[0]).set_state(inputs[0][0].cpu())
            return []

        return restore

    # -- failures ---------------------------------------------------------------------------------------------------
    def _by_operator(
        self, ids: list[int], first: int, serial: int, k: int, values: dict[int, Locals],
        failure: tuple[Exception, int] | None = None,
    ) -> None:  # fmt: skip
        """Run the steps from number ``k`` on one by one: what fails, and what depends on it, is lost, the rest is made.

        Args:
            ids: of the arguments and captured tensors.
            first: of the results.
            values: variables that the steps before have made.
            failure: of step ``k``, and on which device here, if it has run.
        """
        store, at = self._host.store, _TEMPORARY
        store.update((at + v, store[x]) for v, x in enumerate(ids, 1) if x in store)
        store.update((at + v, [t.clone() for t in parts]) for v, parts in self._constants.items())
        store.update((at + v, parts) for v, parts in values.items())
        try:
            for number, step in enumerate(self.steps[k:]):
                self._host.within = step.number
                self._redo(step, serial, failure if number == 0 else None)
        finally:
            self._host.within = None
        for place, v in [*enumerate(self._results, first), *((ids[a - 1], v) for a, v in self._replaced)]:
            if at + v in store:
                store[place] = store[at + v]
        for x in [x for x in store if x > at]:
            del store[x]

    def _redo(self, step: Step, serial: int, failure: tuple[Exception, int] | None) -> None:
        """Run one step on the store, or note that it has failed."""
        host, program = self._host, step.program
        if program is None:
            inputs = [host.store.get(_TEMPORARY + v) for v in step.inputs]
            if all(isinstance(value, list) for value in inputs):
                made = self._other(step)([value for value in inputs if value is not None])
                host.store.update((_TEMPORARY + v, parts) for v, parts in zip(step.outs, made, strict=True))
        elif failure is None:
            host.operate(program, step.command, 0, serial)
        elif isinstance(failure[0], Lost):
            ids = [_TEMPORARY + v for v in step.inputs]
            program.poison(host.store, ids, _TEMPORARY + (step.outs[0] if step.outs else 0), failure[0].poison)
        else:
            program.at = failure[1]
            host.failed(program, step.command, 0, serial, failure[0])


def _with_views_once(steps: list[Step]) -> tuple[list[Step], dict[int, int]]:
    """The steps with each view taken once, and what stands for the others: they would be one memory, whoever writes it."""
    same: dict[int, int] = {}
    seen: dict[Any, list[int]] = {}
    kept = []
    for step in steps:
        step.inputs[:] = [same.get(v, v) for v in step.inputs]
        step.writes[:] = [same.get(v, v) for v in step.writes]
        program = step.program
        if program is not None and step.is_pure and all(r.alias for r in program.plan.results):
            key = (program, tuple(step.inputs), repr(step.numbers))
            if key in seen:
                same.update(zip(step.outs, seen[key], strict=True))
                continue
            seen[key] = step.outs
        kept.append(step)
    return kept, same


def _without_dead(steps: list[Step], used: set[int]) -> list[Step]:
    """The steps without those that only make what nobody uses.

    Args:
        used: what outlives the record; what the steps use is added.
    """
    kept = []
    for step in reversed(steps):
        if step.is_pure and not used.intersection(step.outs):
            continue
        used.update(step.inputs)
        kept.append(step)
    return kept[::-1]
