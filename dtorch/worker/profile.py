"""Measures what a worker does: while a profile runs, this loop over commands stands in for the executor's own.

See ``protocol.events`` for what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from dtorch.core.steps import Step
from dtorch.protocol import commands as C
from dtorch.protocol import events as E

if TYPE_CHECKING:
    from dtorch.worker.executor import Executor

# Rows kept until the client asks for them, which it does long before; further ones are counted only.
_MOST_ROWS = 1 << 20
# Freeing memory for less than this counts as the loop's own time.
_LONG_NS = 20_000


class Profile:
    """What has been measured since the client last asked.

    Args:
        executor: whose commands are run. Its communication goes through here until ``end``.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._began = monotonic_ns()
        self._rows: list[int] = []
        self._replays: list[list[int]] = []
        self._records: dict[int, list[int]] = {}
        self._kept = self._lost = 0
        self._steps: dict[int, int] = {}  # id of a step -> its number; plans keep the steps
        self._table: list[Step] = []
        self._exchange, self._tell = executor.exchange, executor.tell
        executor.exchange, executor.tell = self._timed(self._exchange, E.COLLECTIVE), self._timed(self._tell, E.WORD)

    def end(self) -> None:
        """Measure no more."""
        self._executor.exchange, self._executor.tell = self._exchange, self._tell

    def take(self) -> bytes:
        """What has been measured, see ``protocol.events``; forgets the rows."""
        numbers = {id(spec): number for number, spec in self._executor.specs.items()}
        table = [[s.kind, s.axis, numbers[id(s.src)], numbers[id(s.dst)]] for s in self._table]
        found = [self._began, monotonic_ns(), self._lost, table, self._records, self._rows, self._replays]
        data: bytes = msgpack.packb(found)
        self._rows.clear()
        self._replays.clear()
        self._kept = 0
        return data

    def _keep_within_bounds(self, rows: int, replays: int) -> None:
        """After a batch, before which there were so many: forget what it has brought if that is too much."""
        new = (len(self._rows) - rows) // E.WIDTH + sum(map(len, self._replays[replays:]))
        if self._kept + new > _MOST_ROWS:
            del self._rows[rows:], self._replays[replays:]
            self._lost += new
        else:
            self._kept += new

    def _timed(self, call: Callable[[Step, Any], Any], kind: int) -> Callable[[Step, Any], Any]:
        def run(step: Step, given: Any) -> Any:
            start = monotonic_ns()
            try:
                return call(step, given)
            finally:
                number = self._steps.setdefault(id(step), len(self._table))
                if number == len(self._table):
                    self._table.append(step)
                self._rows.extend((kind, number, self._executor.serial, start, monotonic_ns()))

        return run

    def run(self, frames: Sequence[bytes | memoryview]) -> None:
        """As ``Executor.run``, measured."""
        executor, note, now = self._executor, self._rows.extend, monotonic_ns
        before = len(self._rows), len(self._replays)
        start = now()
        commands = msgpack.unpackb(frames[0], strict_map_key=False)
        i, end = 0, len(commands)
        last = now()
        note((E.DECODING, 0, -1, start, last))
        idle = False  # whether tensors have been freed since ``last``
        with torch.inference_mode():
            while i < end:
                code = commands[i]
                if code < 0:
                    executor.store.pop(-code, None)
                    i, idle = i + 1, True
                    continue
                began = last
                if idle:  # an operator is not to answer for the memory that was given back before it
                    began, idle = now(), False
                    if began - last > _LONG_NS:
                        note((E.FREEING, 0, -1, last, began))
                serial = executor.serial
                if code >= C.FIRST_PLAN:
                    program = executor.programs[code - C.FIRST_PLAN]
                    executor.operate(program, commands, i + 1, serial)
                    executor.serial = serial + 1
                    i += program.width
                    last = now()
                    if not program.absent:
                        note((E.OPERATOR, code - C.FIRST_PLAN, serial, began, last))
                elif code == C.REPLAY:
                    i = self._replay(commands, i + 1, began)
                    last = now()
                else:
                    i = executor.handlers[code](commands, i + 1, frames)
                    last = now()
                    note((E.COMMAND, code, serial, began, last))
        note((E.BATCH, 0, -1, start, now()))
        self._keep_within_bounds(*before)

    def _replay(self, commands: list[Any], i: int, began: int) -> int:
        """Run a record, and note when each of its steps was done."""
        executor, number = self._executor, commands[i]
        record, serial = executor.records[number], executor.serial
        row = [number, serial, began, 0]
        i = record.run(commands, i + 1, serial, row.append)
        row[3] = monotonic_ns()
        executor.serial = serial + 1
        self._replays.append(row)
        if number not in self._records:
            plans = {id(program): plan for plan, program in executor.programs.items()}
            self._records[number] = [
                x for step in record.steps for x in (plans[id(step.program)] if step.program else -1, step.number)
            ]
        return i
