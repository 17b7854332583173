"""The command stream taken apart, as far as repeating it needs: what each command makes, reads and writes. Pure.

Tensors go by their ids, generators by ``-1 - number``; both are called keys here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from dtorch.comm.channel import Buffer
from dtorch.core.errors import ProtocolError
from dtorch.protocol import commands as C

_STEP = 128  # nodes
FREE = -1
"""The code of a node that forgets a tensor."""

ReadShared = Callable[[str, int, int], Buffer]
"""A copy of bytes of the client's shared memory: path, offset, count. A ``memoryview`` if it takes no memory itself."""

Hold = Callable[[str], Any]
"""Keeps a file open, so that it can be read again when it has been removed: its ``path`` leads there as long as the object
is used. ``None`` where that cannot be done."""

_DEFINITIONS = frozenset((C.MESH, C.SPEC, C.PLAN, C.MAP, C.LIMIT))
# Commands that begin, end and use something that is no tensor, with the place of its number.
_BEGINS, _ENDS = {C.OPEN: 2, C.RECORD: 1, C.SAVE: 1}, {C.CLOSE: 1, C.RECORD: 1, C.SAVE: 1}
_USES = {C.LOAD: 3, C.REPLAY: 1, C.WRITE: 1}
_KIND = {
    C.OPEN: C.OPEN, C.CLOSE: C.OPEN, C.LOAD: C.OPEN, C.RECORD: C.RECORD, C.REPLAY: C.RECORD, C.SAVE: C.SAVE,
    C.WRITE: C.SAVE,
}  # fmt: skip
_WIDTHS = {
    C.MESH: 5, C.SPEC: 3, C.PLAN: 3, C.PUT: 4, C.FETCH: 6, C.SEED: 3, C.STATE: 4, C.RESTORE: 3, C.SYNC: 2, C.COUNT: 2,
    C.MAP: 3, C.OPEN: 6, C.CLOSE: 2, C.LOAD: 8, C.RECORD: 3, C.MEMORY: 3, C.SAVE: 3, C.WRITE: 8,
    C.PROFILE: 3, C.LIMIT: 2,
}  # fmt: skip
_FRAME = {C.PUT: 3, C.LOAD: 3}
"""Where a command names a frame; a LOAD does with a negative number."""


@dataclass(slots=True)
class Node:
    """One command.

    Attributes:
        code: as in ``protocol.commands``, or ``FREE``.
        words: the command.
        serial: of an operator, else -1.
        makes, writes, reads: keys.
        shares: the results may be views of what is read.
        frame: the bytes that it brings.
        held: the file that it opens, see ``Hold``.
    """

    code: int
    words: list[Any]
    serial: int = -1
    makes: Sequence[int] = ()
    writes: Sequence[int] = ()
    reads: Sequence[int] = ()
    shares: bool = False
    frame: Buffer | None = None
    held: Any = None


@dataclass(slots=True)
class _Plan:
    """What the stream needs to know of a plan, see ``protocol.plans``. ``written``: slots; ``None``: perhaps all."""

    slots: int
    numbers: int
    new: int
    width: int
    dynamic: bool
    random: bool
    written: tuple[int, ...] | None
    shares: bool


@dataclass(slots=True)
class _Record:
    """What the stream needs to know of a record, see ``protocol.records``."""

    arguments: int
    captured: list[int]
    results: int
    written: list[int]  # places among arguments and captured tensors
    generators: set[int]
    shares: bool


def _plan(data: Sequence[Any]) -> _Plan:
    op, _, slots, numbers, _, _, moves, back, results, _, _, flags, *_ = data
    new = sum(same is None for _, same, _ in results)
    written = [same for _, same, _ in results if same is not None] + [slot for slot, _ in back]
    return _Plan(
        slots=len(slots),
        numbers=numbers,
        new=new,
        width=1 + len(slots) + numbers + bool(new) + bool(flags & 1),
        dynamic=bool(flags & 1),
        random=bool(flags & 2),
        written=tuple(written) if results and not flags & 4 else None,
        shares=any(alias and same is None for _, same, alias in results) or (not op and not any(s for _, s in moves)),
    )


class Reader:
    """Takes the batches of one session apart, in their order.

    Args:
        read_shared: reads the client's shared memory.
        hold: keeps files.
    """

    def __init__(self, read_shared: ReadShared, hold: Hold = lambda path: None) -> None:
        self._read_shared, self._hold = read_shared, hold
        self._plans: dict[int, _Plan] = {}
        self._records: dict[int, _Record] = {}
        self._maps: dict[int, str] = {}
        self._made: set[int] = set()  # tensors that a LOAD has begun
        self.serial = 0

    def read(self, frames: Sequence[Buffer]) -> list[Node]:
        """The nodes of a batch; what lies in shared memory becomes part of them.

        Raises:
            ProtocolError: it holds what is not known here.
        """
        commands = msgpack.unpackb(frames[0], strict_map_key=False)
        nodes: list[Node] = []
        i, end, first = 0, len(commands), C.FIRST_PLAN
        try:
            while i < end:
                code = commands[i]
                if code >= first:
                    plan = self._plans[code - first]
                    node = self._operator(plan, code, commands[i : i + plan.width])
                elif code < 0:
                    self._made.discard(-code)
                    node = Node(FREE, commands[i : i + 1], reads=(-code,))
                elif code == C.REPLAY:
                    node = self._replay(commands, i)
                else:
                    node = self._other(code, commands[i : i + _WIDTHS[code]], frames)
                nodes.append(node)
                i += len(node.words)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise ProtocolError(f"a command that cannot be repeated: {error!r}") from error
        return nodes

    def _operator(self, plan: _Plan, code: int, words: list[Any]) -> Node:
        n = plan.slots
        inputs = words[1 : 1 + n]
        written: Sequence[int] = ()
        if plan.written != ():
            written = inputs if plan.written is None else [inputs[slot] for slot in plan.written]
        made: Sequence[int] = ()
        if plan.new:
            first = words[1 + n + plan.numbers]
            made = range(first, first + plan.new)
        if plan.random:
            generator = -1 - words[n + plan.numbers]  # the last number
            inputs, written = [*inputs, generator], [*written, generator]
        node = Node(code, words, self.serial, made, written, inputs, plan.shares)
        self.serial += 1
        return node

    def _replay(self, commands: list[Any], i: int) -> Node:
        record = self._records[commands[i + 1]]
        end = i + 2 + record.arguments
        inputs = [*commands[i + 2 : end], *record.captured]
        made = range(commands[end], commands[end] + record.results)
        writes = [*(inputs[place] for place in record.written), *record.generators]
        reads = [*inputs, *record.generators]
        node = Node(C.REPLAY, commands[i : end + 1], self.serial, made, writes, reads, record.shares)
        self.serial += 1
        return node

    def _record(self, data: Sequence[Any]) -> _Record:
        """What a record does as a whole, by its variables, which are numbered as ids are."""
        arguments, captured, commands, results, replaced, *_ = data
        nodes: list[Node] = []
        serial, i = self.serial, 0
        while i < len(commands):
            code = commands[i]
            if code >= C.FIRST_PLAN:
                plan = self._plans[code - C.FIRST_PLAN]
                nodes.append(self._operator(plan, code, commands[i : i + plan.width]))
            elif code in (C.STATE, C.RESTORE):
                nodes.append(self._other(code, commands[i : i + _WIDTHS[code]], ()))
            elif code != C.PUT:
                raise ValueError(f"a record holds command {code}")
            i += len(nodes[-1].words) if code != C.PUT else _WIDTHS[code]
        self.serial = serial
        families = _Families({})
        families.follow(nodes)
        find = families.find
        inputs = range(1, arguments + len(captured) + 1)
        written = {find(key) for node in nodes for key in node.writes} | {find(a) for a, _ in replaced}
        given = {find(v) for v in inputs}
        return _Record(
            arguments,
            captured,
            len(results),
            [v - 1 for v in inputs if find(v) in written],
            {key for node in nodes for key in (*node.reads, *node.writes) if key < 0},
            bool(replaced) or not given.isdisjoint(map(find, results)),
        )

    def _other(self, code: int, words: list[Any], frames: Sequence[Buffer]) -> Node:
        node = Node(code, words)
        if code == C.PLAN:
            self._plans[words[1]] = _plan(words[2])
        elif code == C.RECORD:
            if words[2] is None:
                self._records.pop(words[1], None)
            else:
                self._records[words[1]] = self._record(words[2])
        elif code == C.MAP:
            self._maps[words[1]] = words[2]
        elif code == C.PUT:
            node.makes, node.frame = (words[1],), frames[words[3]]
        elif code == C.LOAD:
            self._load(node)
        elif code == C.SEED:
            node.writes = (-1 - words[1],)
        elif code == C.STATE:
            node.makes, node.reads = (words[2],), (-1 - words[1],)
        elif code == C.RESTORE:
            node.writes, node.reads = (-1 - words[1],), (words[2],)
        elif code == C.WRITE:
            node.reads = (words[3],)
        elif code == C.OPEN:
            node.held = self._hold(words[3])
        return node

    def _load(self, node: Node) -> None:
        _, tensor, _, file, offset, dtype, box, _ = node.words
        node.serial, self.serial = self.serial, self.serial + 1
        node.makes, node.writes = ((), (tensor,)) if tensor in self._made else ((tensor,), ())
        self._made.add(tensor)
        if file in self._maps:
            count = math.prod(high - low for low, high in box) * _itemsize(dtype)
            node.frame = self._read_shared(self._maps[file], offset, count)


def _itemsize(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1


def write(nodes: Sequence[Node], first: int | None = None, last: int | None = None) -> list[Buffer]:
    """The payload of a batch with these nodes.

    Args:
        nodes: in their order.
        first: the number that a worker would give the first operator; ``None``: nothing is missing between the nodes.
        last: the number that it is to give the next operator after them.
    """
    commands: list[Any] = []
    frames: list[Buffer] = [b""]
    for node in nodes:
        if first is not None and node.serial >= 0:
            if node.serial != first:
                commands.extend((C.COUNT, node.serial))
            first = node.serial + 1
        words = node.words
        if node.held is not None:
            words = [*words[:3], node.held.path, *words[4:]]
        if node.frame is not None:
            at = _FRAME[node.code]
            words = [*words]
            words[at] = len(frames) if node.code == C.PUT else -len(frames)
            if node.code == C.LOAD:
                words[4] = 0
            frames.append(node.frame)
        commands.extend(words)
    if last is not None:
        commands.extend((C.COUNT, last))
    frames[0] = msgpack.packb(commands)
    return frames


def needed(nodes: Sequence[Node], held: Mapping[int, int]) -> Generator[None, None, list[Node]]:
    """Those of the nodes without which a value that is alive after them, or the state of a generator, would be another.

    Requests of the client are left out. What shares memory is taken together. This takes long, so it is done in steps
    of some tenths of a millisecond.

    Args:
        nodes: from the start of the session, or from a snapshot on.
        held: what a snapshot holds, see ``families``.
    """
    found = _Families(held)
    for i in range(0, len(nodes), _STEP):
        found.follow(nodes[i : i + _STEP])
        yield
    find = found.find
    wanted = {find(key) for key in found.alive}
    used = _unended(nodes)
    saves = {subject for subject in used if subject[0] == C.SAVE}
    kept: list[Node] = []
    for i, node in enumerate(reversed(nodes)):
        if not i % _STEP:
            yield
        code = node.code
        if code == FREE or code in _DEFINITIONS or code in _BEGINS or code in _ENDS:
            kept.append(node)
        elif code == C.WRITE:
            if _subject(node, _USES) in saves:  # it may not have come to the disk
                wanted.update(map(find, node.reads))
                kept.append(node)
        elif not (wanted.isdisjoint(map(find, node.makes)) and wanted.isdisjoint(map(find, node.writes))):
            if code in (C.SEED, C.RESTORE):  # what the generator was before does not matter
                wanted.discard(find(node.writes[0]))
            wanted.update(map(find, node.reads))
            if code in _USES:
                used.add(_subject(node, _USES))
            kept.append(node)
    made = held.keys() | {key for node in kept for key in node.makes}

    def matters(node: Node) -> bool:
        if node.code == FREE:
            return node.reads[0] in made
        if node.code in _BEGINS or node.code in _ENDS:
            return _subject(node, _BEGINS if node.code in _BEGINS else _ENDS) in used
        return True

    return [node for node in reversed(kept) if matters(node)]


def families(nodes: Sequence[Node], held: Mapping[int, int]) -> dict[int, int]:
    """The keys that are alive after the nodes, each with one that stands for all that share memory with it.

    Args:
        nodes: from the start of the session, or from a snapshot on.
        held: the same for what the snapshot holds.
    """
    found = _Families(held)
    found.follow(nodes)
    first: dict[int, int] = {}
    return {key: first.setdefault(found.find(key), key) for key in found.alive}


def remaining(nodes: Sequence[Node]) -> list[Node]:
    """What a snapshot taken after the nodes does not hold: definitions, records, and files and saves that are open.

    What a save was to write by then is on the disk.
    """
    open_still = _unended(nodes)
    return [
        node
        for node in nodes
        if node.code in _DEFINITIONS or (node.code in _BEGINS and _subject(node, _BEGINS) in open_still)
    ]


def _subject(node: Node, places: Mapping[int, int]) -> tuple[int, int]:
    """The file, record or save that a node is about."""
    return _KIND[node.code], node.words[places[node.code]]


def _unended(nodes: Sequence[Node]) -> set[tuple[int, int]]:
    """The files, records and saves that are there after the nodes."""
    there: set[tuple[int, int]] = set()
    for node in nodes:
        if node.code == C.CLOSE or (node.code in (C.RECORD, C.SAVE) and node.words[2] is None):
            there.discard(_subject(node, _ENDS))
        elif node.code in _BEGINS:
            there.add(_subject(node, _BEGINS))
    return there


class _Families:
    """Which keys share memory, and which are alive in the end."""

    def __init__(self, held: Mapping[int, int]) -> None:
        self._up = dict(held)
        self.alive = set(held)

    def follow(self, nodes: Sequence[Node]) -> None:
        """What changes by the next nodes."""
        up, alive, find = self._up, self.alive, self.find
        for node in nodes:
            if node.code == FREE:
                alive.discard(node.reads[0])
                continue
            alive.update(node.makes)
            if node.shares:
                keys = [key for key in (*node.reads, *node.makes) if key >= 0]  # generators share nothing
                for key in keys[1:]:
                    up[find(key)] = find(keys[0])
            if node.writes and node.writes[-1] < 0:  # a generator
                alive.add(node.writes[-1])
                if node.code == C.SEED and node.words[2] is None:
                    alive.discard(node.writes[-1])

    def find(self, key: int) -> int:
        """What stands for the family of a key."""
        up = self._up
        while (above := up.get(key, key)) != key:
            up[key] = up.get(above, above)
            key = above
        return key
