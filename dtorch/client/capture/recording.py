"""What one recorded call did: its commands with variables for ids, its result, and what it left behind."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from dtorch.client.capture.key import Arguments
from dtorch.client.capture.recorder import Recorder
from dtorch.client.capture.state import State
from dtorch.client.handle import Handle
from dtorch.client.session import Session
from dtorch.client.sites import Site, describe
from dtorch.client.tensor import DTensor
from dtorch.client.wrap import live_shadow
from dtorch.core.spec import MeshLayout
from dtorch.core.torch_private import trees
from dtorch.protocol import commands as C
from dtorch.protocol.plans import WirePlan, decode_plan
from dtorch.protocol.records import Shares, WireRecord, may_share, written_slots
from dtorch.protocol.values import decode

# Operands of the commands that only tell workers of something, and are not part of a record.
_TOLD = {C.MESH: 4, C.SPEC: 2, C.PLAN: 2, C.COUNT: 1, C.MAP: 2, C.CLOSE: 1, C.RECORD: 2, C.SAVE: 2, C.LIMIT: 1}
# Those that wait for an answer; whoever waits has told the recorder.
_ASKED = {C.FETCH: 5, C.SYNC: 1, C.OPEN: 5, C.WRITE: 7, C.MEMORY: 2, C.PROFILE: 2}


class Refused(Exception):
    """A call cannot be replayed.

    Args:
        reason: a clause, "it reads a value".
        site: the user's line, where there is one.
    """

    def __init__(self, reason: str, site: Site | None = None) -> None:
        super().__init__(reason)
        self.reason, self.site = reason, site


@dataclass
class Stream:
    """The commands of a recording.

    Attributes:
        flat: commands in the form of ``protocol.records``.
        captured: ids of tensors that were there before and are no arguments, in order of first use.
        marks: (index in ``flat``, number of the operator) of each operator.
        alive: id -> variable of what was made and not dropped.
        replaced: argument or captured id -> the variable that it stands for at the end.
        written: argument and captured variables whose values have changed.
        draws: number of each generator drawn from -> mesh of the first draw.
        first: id -> variable of arguments and captured tensors.
        variables: id -> the last variable of every tensor.
    """

    flat: list[Any] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)
    alive: dict[int, int] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    draws: dict[int, MeshLayout] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    variables: dict[int, int] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    flows: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def sources(self, variable: int) -> set[int]:
        """The argument and captured variables that a variable's value may depend on, at any time of the call."""
        into: dict[int, set[int]] = {}
        for inputs, targets in self.flows:
            for target in targets:
                into.setdefault(self.shares.root(target), set()).update(map(self.shares.root, inputs))
        todo, seen = [self.shares.root(variable)], set()
        while todo:
            root = todo.pop()
            if root not in seen:
                seen.add(root)
                todo.extend(into.get(root, ()))
        return {v for v in self.first.values() if self.shares.root(v) in seen}


class Reader:
    """Reads the batches of a recorder.

    Args:
        arguments: ids of the distinct tensors among the call's arguments.

    Raises:
        Refused: there is something that no record can hold.
    """

    def __init__(self, recorder: Recorder, arguments: Sequence[int]) -> None:
        self._session: Session = recorder.session
        self._recorder = recorder
        self._specs = self._session.known_specs()
        self._plans: dict[int, WirePlan] = {}
        self.arguments = list(arguments)
        self.out = Stream()
        self._variables = self.out.variables
        self._variables.update((x, v) for v, x in enumerate(self.arguments, 1))
        self._shares = self.out.shares
        self._writes: set[int] = set()
        self._operators = 0
        commands = [(command, frames) for batch, frames in recorder.batches for command in self._split(batch)]
        self._find_captured([command for command, _ in commands])
        self._next = len(self._variables) + 1
        for command, frames in commands:
            self._take(command, frames)
        roots = {self._shares.root(v) for v in self._writes}
        self.out.written = {v for v in self.out.first.values() if self._shares.root(v) in roots}

    def _plan(self, code: int) -> WirePlan:
        number = code - C.FIRST_PLAN
        plan = self._plans.get(number)
        if plan is None:
            data = self._session.wire_plans[number]
            plan = self._plans[number] = decode_plan(data, self._specs, decode)
        return plan

    def _split(self, batch: list[Any]) -> list[list[Any]]:
        """The commands of a batch, without those that only tell of something."""
        found, i = [], 0
        while i < len(batch):
            code = batch[i]
            if code >= C.FIRST_PLAN:
                plan = self._plan(code)
                width = len(plan.slots) + plan.numbers + any(r.same is None for r in plan.results) + plan.dynamic
            elif code < 0:
                width = 0
            else:
                width = {**_TOLD, **_ASKED, C.PUT: 3, C.SEED: 2, C.STATE: 3, C.RESTORE: 2, C.LOAD: 7, C.REPLAY: 0}[code]
            if code not in _TOLD and code not in _ASKED:
                found.append(batch[i : i + 1 + width])
            i += 1 + width
        return found

    def _find_captured(self, commands: list[list[Any]]) -> None:
        """Number the tensors that were there before, in order of first use."""
        made: set[int] = set()
        for code, *operands in commands:
            if code >= C.FIRST_PLAN:
                plan = self._plan(code)
                n = len(plan.slots)
                for x in operands[:n]:
                    if x not in made and x not in self._variables:
                        self.out.captured.append(x)
                        self._variables[x] = len(self._variables) + 1
                new = sum(r.same is None for r in plan.results)
                made.update(operands[n + plan.numbers] + k for k in range(new))
            elif code == C.PUT:
                made.add(operands[0])
            elif code == C.STATE:
                made.add(operands[1])
        self.out.first = dict(self._variables)

    def _new(self, tensor_id: int) -> int:
        variable, self._next = self._next, self._next + 1
        if tensor_id in self.out.first:
            self.out.replaced[tensor_id] = variable
        else:
            self.out.alive[tensor_id] = variable
        self._variables[tensor_id] = variable
        return variable

    def _take(self, command: list[Any], frames: Sequence[Any]) -> None:
        code, *operands = command
        flat, site = self.out.flat, self._site()
        if code >= C.FIRST_PLAN:
            self._operator(code, self._plan(code), operands)
        elif code < 0:
            self.out.alive.pop(-code, None)
        elif code == C.PUT:
            flat.extend((code, self._new(operands[0]), operands[1], bytes(frames[operands[2] - 1])))
        elif code == C.STATE:
            flat.extend((code, operands[0], self._new(operands[1]), operands[2]))
        elif code == C.RESTORE:
            flat.extend((code, operands[0], self._variables[operands[1]]))
        elif code == C.SEED:
            if operands[1] is not None:
                raise Refused("it seeds a generator", site)
        elif code == C.LOAD:
            raise Refused("it uploads a large plain tensor", site)
        else:
            raise Refused("it runs another captured function", site)

    def _operator(self, code: int, plan: WirePlan, operands: list[Any]) -> None:
        n = len(plan.slots)
        if plan.dynamic:
            raise Refused("the shape of a result depends on values", self._site())
        inputs, numbers = [self._variables[x] for x in operands[:n]], operands[n : n + plan.numbers]
        self.out.marks.append((len(self.out.flat), self._operators))
        self._operators += 1
        written = [inputs[slot] for slot in written_slots(plan)]
        self._writes.update(written)
        if plan.random:
            mesh = next((s.mesh for s in (*plan.slots, *(r.spec for r in plan.results)) if s is not None), None)
            if mesh is not None:
                self.out.draws.setdefault(numbers[-1], mesh)
        first = operands[n + plan.numbers :]
        new = [self._new(first[0] + k) for k in range(sum(r.same is None for r in plan.results))]
        self.out.flows.append((inputs, [*new, *written]))
        if may_share(plan):
            for a in inputs:
                for b in new:
                    self._shares.join(a, b)
        self.out.flat.extend((code, *inputs, *numbers, *new[:1]))

    def _site(self) -> Site | None:
        sites = self._recorder.sites
        return sites[min(self._operators, len(sites) - 1)] if sites else None


@dataclass
class Recording:
    """A recorded call.

    Attributes:
        stream: its commands.
        sites: where each operator was issued.
        packed: everything that must be equal in two recordings of one kind of call.
        tree: structure of the result.
        leaves: ("argument", place), ("new", index of a result), or ("value", it) for each leaf of it.
        made: tensors that outlive the call, in order: results, then gradients.
        gradients: (tensor, index in ``made``) of each gradient that the call has set.
        cleared: tensors whose gradient it has taken away.
        state: everything else that the function can reach.
        grads: by ``id`` of each tensor that keeps a gradient: that of before.
        argument_ids: ids of the distinct tensors among the arguments when it began.
        steered_by: host copies that the program has looked at, each by its argument's place or its handle.
    """

    recorder: Recorder
    arguments: Arguments
    stream: Stream
    sites: list[Site]
    packed: bytes
    tree: Any
    leaves: list[tuple[str, Any]]
    made: list[Any]
    gradients: list[tuple[Any, int]]
    cleared: list[Any]
    state: State
    grads: dict[int, Handle | None]
    argument_ids: tuple[int, ...]
    steered_by: list[tuple[int | Handle, Any]]

    @property
    def session(self) -> Session:
        """The session it was recorded in."""
        return self.recorder.session

    @property
    def wire(self) -> WireRecord:
        """The record as workers get it."""
        stream = self.stream
        return WireRecord(
            len(self.argument_ids), tuple(stream.captured), stream.flat,
            tuple(stream.alive[t._h.id] for t in self.made),
            tuple((stream.first[x], v) for x, v in stream.replaced.items()),
        )  # fmt: skip

    @property
    def outline(self) -> Outline:
        """What is needed to compare it with later ones; keeps no tensor."""
        return Outline(self.packed, self.stream, self.sites)


@dataclass(frozen=True)
class Outline:
    """What a recording is compared by, as in ``Recording``."""

    packed: bytes
    stream: Stream
    sites: list[Site]


def difference(a: Outline, b: Outline) -> Refused:
    """In what two recordings differ, as the reason why there is no record."""
    numbers = {number: at for at, number in b.stream.marks}
    for (i, number), (j, _) in zip(a.stream.marks, b.stream.marks, strict=False):
        end_a = numbers.get(number + 1, len(b.stream.flat)) - j
        left, right = a.stream.flat[i : i + end_a], b.stream.flat[j : j + end_a]
        if msgpack.packb(left) == msgpack.packb(right):
            continue
        changed = next(((x, y) for x, y in zip(left, right, strict=False) if x != y), None)
        site = b.sites[number] if number < len(b.sites) else None
        if changed is not None and isinstance(changed[1], bytes):
            return Refused("it uploads a plain tensor whose values differ from call to call", site)
        if left[:1] == right[:1] and changed is not None:
            return Refused(f"a number differs from call to call ({changed[0]!r} became {changed[1]!r})", site)
        return Refused("two calls of the same kind issued different operators", site)
    if len(a.stream.marks) != len(b.stream.marks):
        k = min(len(a.stream.marks), len(b.stream.marks))
        longer = a if len(a.stream.marks) > k else b
        return Refused("two calls of the same kind issued different operators", longer.sites[k])
    if a.stream.captured != b.stream.captured:
        return Refused("it reads other tensors from call to call")
    if a.stream.flat != b.stream.flat:
        return Refused("it uploads a plain tensor whose values differ from call to call")
    return Refused("what it returns or leaves behind differs from call to call")


def examine(
    recorder: Recorder, arguments: Arguments, ids: tuple[int, ...], before: State, grads: dict[int, Handle | None],
    shadows: dict[int, Any], result: Any,
) -> Recording:  # fmt: skip
    """Make sense of what was recorded.

    Args:
        recorder: stopped.
        arguments, ids: of the call; the ids that its tensors had when it began.
        before: the state when it began.
        grads: for each of the state's and the arguments' tensors that keeps a gradient, by ``id``: that of then.
        shadows: host copies of the arguments then, by place.
        result: what the call returned.

    Raises:
        Refused: it cannot be replayed.
    """
    for reason, site in recorder.blocks:
        raise Refused(reason, site)
    if not recorder.is_alone():
        raise Refused("another thread issues operators at the same time")
    stream = Reader(recorder, ids).out
    change = before.change()
    if change is not None:
        raise Refused(f"the call itself changes {change}, which a replay would not")
    if recorder.drew_on_host():
        raise Refused("it draws random numbers in this process")
    if recorder.seeded():
        raise Refused("it seeds a generator")
    steered_by = _steered_by(recorder, ids, stream, shadows)
    made, leaves, tree = _results(recorder, arguments, stream, result)
    holders = list({id(t): t for t in (*arguments.tensors, *before.tensors)}.values())
    gradients, cleared = [], []
    for t in holders:
        if id(t) not in grads:
            continue
        old, new = grads[id(t)], t.grad
        if new is not None and new._h.id in stream.alive and (old is None or new._h is not old):
            gradients.append((t, _place(made, new, stream)))
        elif new is None and old is not None:
            cleared.append(t)
    return Recording(
        recorder, arguments, stream, recorder.sites, _packed(stream, arguments, leaves, made, gradients, cleared), tree,
        leaves, made, gradients, cleared, before, grads, ids, steered_by,
    )  # fmt: skip


def unexplained(recording: Recording) -> Refused | None:
    """Why not, if a tensor made by the call is held by something that a replay cannot give its successor to."""
    stream = recording.stream
    rest = {v for x, v in stream.alive.items() if x not in {t._h.id for t in recording.made}}
    if not rest:
        return None
    if any(t.requires_grad for t in recording.made if t.grad_fn is not None and not _is_spent(t.grad_fn)):
        return Refused(
            "its result needs a derivative; capture the whole training step, or call it under torch.no_grad()"
        )
    site = None
    for at, number in stream.marks:
        code = stream.flat[at]
        plan = decode_plan(
            recording.session.wire_plans[code - C.FIRST_PLAN], recording.session.known_specs(), decode
        )
        first = at + 1 + len(plan.slots) + plan.numbers
        new = sum(r.same is None for r in plan.results)
        if new and rest.intersection(range(stream.flat[first], stream.flat[first] + new)):
            site = recording.sites[number]
            break
    return Refused("it keeps a tensor that it has made, in a place that a replay cannot reach", site)


def _steered_by(
    recorder: Recorder, ids: tuple[int, ...], stream: Stream, shadows: dict[int, Any]
) -> list[tuple[int | Handle, Any]]:
    """What the call depends on by looking at host copies: (place of the argument or handle, value)."""
    found: dict[Any, tuple[int | Handle, Any]] = {}
    for x, ref, site in recorder.copies:
        if x not in stream.variables:
            handle = ref()
            if handle is None or handle.id != x:
                raise Refused("it looks at a value", site)
            found[id(handle)] = handle, _copy_of(handle, site)
            continue
        for v in stream.sources(stream.variables[x]):
            if v in stream.written:
                raise Refused("it looks at a value that depends on what it changes", site)
            if v <= len(ids):
                if v - 1 not in shadows:
                    raise Refused("it looks at a value", site)
                found[v] = v - 1, shadows[v - 1]
            else:
                holder = find_handles(recorder.session, [stream.captured[v - 1 - len(ids)]])
                found[v] = holder[0], _copy_of(holder[0], site)
    return list(found.values())


def _copy_of(handle: Handle, site: Site) -> Any:
    value = live_shadow(handle)
    if value is None:
        raise Refused("it looks at a value that it changes", site)
    with torch.inference_mode(False), torch.no_grad():
        return value.clone()


def find_handles(session: Session, ids: Sequence[int]) -> list[Handle]:
    """The handles with these ids. Looks through all objects of the process: not for every call.

    Raises:
        Refused: one is gone.
    """
    wanted = set(ids)
    found = {h.id: h for h in gc.get_objects() if type(h) is Handle and h.session is session and h.id in wanted}
    if len(found) < len(wanted):
        raise Refused("it drops a tensor that it has read")
    return [found[x] for x in ids]


def _results(
    recorder: Recorder, arguments: Arguments, stream: Stream, result: Any
) -> tuple[list[Any], list[tuple[str, Any]], Any]:
    flat, tree = trees().tree_flatten(result)
    made: list[Any] = []
    leaves: list[tuple[str, Any]] = []
    for value in flat:
        place = next((i for i, a in enumerate(arguments.leaves) if a is value), None)
        if place is not None and not isinstance(value, (int, float, bool, str, type(None))):
            leaves.append(("argument", place))
        elif not isinstance(value, DTensor):
            leaves.append(("value", value))
        elif value._h.id not in stream.alive:
            if value._h.id > recorder.first_id or value._h.session is not recorder.session:
                raise Refused("it returns a tensor whose making was not seen")
            leaves.append(("value", value))
        else:
            h: Handle = value._h
            if h.view is not None:
                raise Refused("it returns a view that had to be copied to other devices")
            if value.grad_fn is not None and not _is_spent(value.grad_fn):
                raise Refused(
                    "its result needs a derivative; capture the whole training step, or call it under torch.no_grad()"
                )
            leaves.append(("new", _place(made, value, stream)))
    return made, leaves, tree


def _place(made: list[Any], value: Any, stream: Stream) -> int:
    """The place of a tensor among those that outlive the call, where it and what it is a view of are entered."""
    for j, t in enumerate(made):
        if t is value:
            return j
    base = value._base
    if isinstance(base, DTensor) and base._h.id in stream.alive:
        _place(made, base, stream)
    if any(t._h is value._h for t in made):
        raise Refused("it returns two objects for one tensor")
    made.append(value)
    return len(made) - 1


def _packed(
    stream: Stream, arguments: Arguments, leaves: list[tuple[str, Any]], made: list[Any],
    gradients: list[tuple[Any, int]], cleared: list[Any],
) -> bytes:  # fmt: skip
    """What two recordings of a kind have in common, as bytes: numbers of equal value but other type, nan and -0 count."""

    def leaf(kind: str, value: Any) -> Any:
        if kind != "value" or value is None or type(value) in (int, float, bool, str):
            return [kind, value]
        plain = isinstance(value, (torch.dtype, torch.device, torch.Size, complex))
        return [kind, repr(value) if plain else id(value)]

    def holder(t: Any) -> int:
        return next((-k for k, argument in enumerate(arguments.tensors, 1) if argument is t), id(t))

    return bytes(
        msgpack.packb(
            [
                stream.flat, stream.captured, [leaf(*pair) for pair in leaves], [stream.alive[t._h.id] for t in made],
                [[holder(t), j] for t, j in gradients], [holder(t) for t in cleared],
                [[stream.first[x], v] for x, v in stream.replaced.items()],
            ]
        )
    )  # fmt: skip


def _is_spent(node: Any) -> bool:
    """Whether backward has run through a graph and freed what it had saved."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                try:
                    getattr(node, name)
                except RuntimeError:
                    return True
        todo.extend(next_node for next_node, _ in node.next_functions)
    return False


def shadows_of(arguments: Arguments) -> dict[int, Any]:
    """Copies of the host copies of the arguments, by place."""
    found = {}
    for k, h in enumerate(arguments.handles):
        value = live_shadow(h)
        if value is not None:
            with torch.inference_mode(False), torch.no_grad():
                found[k] = value.clone()
    return found


def where(site: Site | None) -> str | None:
    """``file:line`` of a site."""
    return None if site is None else describe(site)
