"""Records: commands that a client has issued once and wants run again and again by one command, REPLAY.

A record speaks of tensors by variables, numbered from 1: its arguments, then the tensors it captures (which keep the
ids they have), then what its commands make, in order. Every variable is given a value once. The commands are those of
``protocol.commands`` with variables for ids, and with its bytes in place of the frame in a PUT; only operators, PUT,
STATE and RESTORE are among them, and nothing is freed: who runs a record sees for itself what is used last where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.core.errors import ProtocolError
from dtorch.protocol import commands as C
from dtorch.protocol.plans import WirePlan
from dtorch.protocol.values import Slot

# Operands of the commands that a record may hold beside operators; a worker needs to know which of them are variables.
WIDTHS = {C.PUT: 3, C.STATE: 3, C.RESTORE: 2}


@dataclass(frozen=True)
class WireRecord:
    """A record as workers get it.

    Attributes:
        arguments: number of tensors that every REPLAY names.
        captured: ids of the tensors that it reads beside them.
        commands: flat, see above.
        results: variables of the new tensors that outlive it, in order.
        replaced: (argument or captured variable, variable): what it stands for from then on.
        fuse: operators in a row may become one compiled function, whose results differ in the last bits.
    """

    arguments: int
    captured: tuple[int, ...]
    commands: list[Any]
    results: tuple[int, ...]
    replaced: tuple[tuple[int, int], ...]
    fuse: bool = False


def encode_record(record: WireRecord) -> list[Any]:
    """The msgpack form."""
    return [
        record.arguments, list(record.captured), record.commands, list(record.results),
        [list(pair) for pair in record.replaced], record.fuse,
    ]  # fmt: skip


def decode_record(data: Any) -> WireRecord:
    """The inverse of ``encode_record``.

    Raises:
        ProtocolError: malformed data.
    """
    try:
        arguments, captured, commands, results, replaced, fuse = data
        return WireRecord(
            int(arguments),
            tuple(map(int, captured)),
            list(commands),
            tuple(map(int, results)),
            tuple((int(a), int(b)) for a, b in replaced),
            bool(fuse),
        )
    except (ValueError, TypeError) as e:
        raise ProtocolError(f"malformed record: {e}") from e


def operator_of(name: str) -> Any:
    """The operator of a plan's name; the plan has been checked before."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def slots_in(value: Any) -> Iterator[int]:
    """The tensor slots that an argument names."""
    if type(value) is Slot:
        yield value.index
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from slots_in(v)


def written_slots(plan: WirePlan) -> frozenset[int]:
    """The slots whose tensors a plan writes."""
    found = {r.same for r in plan.results if r.same is not None}
    if plan.op:
        arguments = operator_of(plan.op)._schema.arguments
        for i, a in enumerate(arguments):
            if a.alias_info is not None and a.alias_info.is_write:
                found.update(slots_in(plan.args[i] if i < len(plan.args) else plan.kwargs.get(a.name)))
    return frozenset(found)


def may_share(plan: WirePlan) -> bool:
    """Whether a new result may lie in the memory of an input: views, and what is not torch's own operator."""
    return not plan.op or plan.kernel is not None or any(r.alias and r.same is None for r in plan.results)


class Shares:
    """Which variables may share memory; a union of sets."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def root(self, variable: int) -> int:
        """The variable that stands for all that share its memory."""
        parent = self._parent
        while (up := parent.get(variable, variable)) != variable:
            parent[variable] = variable = parent.get(up, up)
        return variable

    def join(self, a: int, b: int) -> None:
        """Two variables may share memory."""
        self._parent[self.root(a)] = self.root(b)
