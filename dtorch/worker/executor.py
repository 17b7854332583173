"""Runs a session's command stream on the devices of one worker."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch

from dtorch.core.errors import CommError, ProtocolError
from dtorch.core.memory import copy
from dtorch.core.pieces import piece_of, slices
from dtorch.core.spec import MeshLayout, TensorSpec, dense_strides
from dtorch.protocol import commands as C
from dtorch.protocol.plans import WirePlan, decode_plan
from dtorch.protocol.records import decode_record
from dtorch.protocol.values import decode, decode_spec, dtype_from, dtype_name
from dtorch.worker import snapshot
from dtorch.worker.budget import Budget, local_bytes
from dtorch.worker.collectives import Collectives
from dtorch.worker.files import Bytes, Files, SharedMemory, load
from dtorch.worker.generators import Generators
from dtorch.worker.memory import fresh, give_back
from dtorch.worker.meter import MeteredStore, blocks, parts
from dtorch.worker.profile import Profile
from dtorch.worker.program import Poison, Program
from dtorch.worker.record import Record
from dtorch.worker.saves import Saves
from dtorch.worker.streams import Streams, device_of

# In place of an operator's serial, where something else failed.
_NO_OPERATOR = -1
Send = Callable[[list[bytes | memoryview]], None]


class Executor:
    """The state of one worker: meshes, plans, tensors, generators; and the loop over commands.

    Args:
        devices: global numbers of the devices hosted here.
        send: sends a reply (frames) towards the client.
        peers_dir: where workers meet to form process groups (see ``Groups``), ``None`` when there are no other workers.
        index: this worker's number.
        physical: the torch device on which local tensors live.
        file_roots: directories below which files may be read and written; by default those of the environment.
        hostname: address on which this worker listens for others.
    """

    def __init__(
        self, devices: Sequence[int], send: Send, peers_dir: str | None = None, index: int = 0, physical: str = "cpu",
        file_roots: Sequence[str] | None = None, hostname: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self.devices, self.index = list(devices), index
        self._send = send
        self.device = device_of(physical, devices)
        self.streams = Streams(self.device)
        self.collectives = Collectives(index, peers_dir, device=self.device, hostname=hostname)
        self.generators = Generators(self.device)
        self.files = Files(file_roots, maps=peers_dir is not None)
        self.saves = Saves(lambda save, fault: self._reply([C.SAVED, save, index, fault]), file_roots)
        self.meshes: dict[int, MeshLayout] = {}
        self.positions: dict[int, list[int]] = {}
        self.specs: dict[int, TensorSpec] = {}
        self.programs: dict[int, Program] = {}
        self.store: dict[int, Any] = {}
        self.records: dict[int, Record] = {}
        self.serial = 0  # operators seen so far, the client's numbering
        self.exchange: Callable[[Any, Any], Any] = self.collectives.run
        self.tell: Callable[[Any, Any], Any] = self.collectives.tell
        self.profile: Profile | None = None
        self.budget: Budget | None = None
        self._muted = 0  # replies that are not to be sent
        self.within: int | None = None  # number of the operator within the record that runs
        self.handlers: list[Callable[[list[Any], int, Sequence[memoryview]], int]] = [
            self._mesh, self._spec, self._plan, self._put, self._fetch, self._seed, self._state,
            self._restore, self._sync, self._count, self._map, self._open, self._close, self._load, self._record,
            self._replay, self._memory, self._save, self._write, self._profile, self._limit,
        ]  # fmt: skip

    def run(self, frames: Sequence[bytes | memoryview]) -> None:
        """Run one batch.

        Raises:
            ProtocolError: the batch does not follow the protocol; the session cannot go on.
            CommError: another worker is gone or does not answer; neither can go on.
        """
        if self.profile is not None:
            self.profile.run(frames)
            return
        commands = msgpack.unpackb(frames[0], strict_map_key=False)
        i, end = 0, len(commands)
        serial = self.serial
        programs, store, handlers = self.programs, self.store, self.handlers
        first, pop = C.FIRST_PLAN, store.pop
        with torch.inference_mode():  # cheaper than no_grad, for views above all
            while i < end:
                code = commands[i]
                if code >= first:
                    program = programs[code - first]
                    if program.simple is not None:
                        try:
                            i = program.simple(store, commands, i + 1)
                        except Exception as e:
                            self.failed(program, commands, i + 1, serial, e)
                            i += program.width
                    elif program.absent:
                        i += program.width
                    else:
                        try:
                            self._general(program, commands, i + 1)
                        except Exception as e:
                            self.failed(program, commands, i + 1, serial, e)
                        i += program.width
                    serial += 1
                elif code < 0:
                    pop(-code, None)
                    i += 1
                else:
                    self.serial = serial
                    i = handlers[code](commands, i + 1, frames)
                    serial, store = self.serial, self.store
                    pop = store.pop
        self.serial = serial

    def mute(self, replies: int) -> None:
        """Send so few replies less from now on, reports of failures and of saves not counted."""
        self._muted = replies

    def save(self, path: str) -> None:
        """Write tensors, generators and lost values to a file; meshes, plans and files are not in it.

        Raises:
            OSError: it cannot be written.
        """
        self.saves.settle()  # who starts from here does not write it again
        tensors = {number: list(value) for number, value in self.store.items() if not isinstance(value, Poison)}
        lost = {number: (v.serial, v.text) for number, v in self.store.items() if isinstance(v, Poison)}
        snapshot.save(path, snapshot.Snapshot(tensors, lost, self.generators.states(), self.serial))

    def restore(self, path: str) -> None:
        """Take what ``save`` wrote.

        Raises:
            OSError, ProtocolError: there is no snapshot.
        """
        found = snapshot.load(path, self.device)
        self.store = {**found.tensors, **{number: Poison(*why) for number, why in found.lost.items()}}
        self.generators.set_states(found.generators)
        self.serial = found.serial

    def close(self) -> None:
        """Forget everything and leave the process groups."""
        self.store.clear()
        self.saves.close()
        self.files.close_all()
        self.collectives.close()

    def operate(self, program: Program, commands: list[Any], i: int, serial: int) -> None:
        """Run one operator whose operands begin at ``i``."""
        if program.absent:
            return
        try:
            if program.simple is not None:
                program.simple(self.store, commands, i)
            else:
                self._general(program, commands, i)
        except Exception as e:
            self.failed(program, commands, i, serial, e)

    # -- operators --------------------------------------------------------------------------------------------------
    def _general(self, program: Program, commands: list[Any], i: int) -> None:
        """Run a program with moves, kernels, several local devices, dynamic or random results."""
        plan = program.plan
        n = len(plan.slots)
        ids = commands[i : i + n]
        numbers = commands[i + n : i + n + plan.numbers]
        first_out = commands[i + n + plan.numbers] if program.takes_id else 0
        poison = next((v for x in ids if isinstance(v := self.store.get(x), Poison)), None)
        inputs = [self._value(x, spec, poison) for x, spec in zip(ids, plan.slots, strict=True)]
        made = self.perform(program, inputs, numbers, poison)
        if isinstance(made, Poison):
            program.poison(self.store, ids, first_out, made)
            self._answer(program, commands, i, None, made)
            return
        for new, k in enumerate(program.new, first_out):
            self.store[new] = made[k]
        if self.budget is not None:
            self.budget.made(plan.mesh, range(first_out, first_out + len(program.new)))
        if plan.dynamic:
            found = [[list(t.shape), list(t.stride()), dtype_name(t.dtype)] for local in made for t in local[:1]]
            self._answer(program, commands, i, found, None)

    def perform(
        self, program: Program, given: Sequence[list[torch.Tensor]], numbers: list[Any], poison: Poison | None = None
    ) -> list[list[torch.Tensor]] | Poison:
        """Results of a program, each on every local device; or what they are lost to, here or on another worker.

        Args:
            given: each input on every local device of its mesh; what is written is written to these.
            numbers: its changing scalars.
            poison: why the inputs mean nothing, if so.
        """
        plan, inputs = program.plan, list(given)
        for slot, steps in plan.moves:
            for step in steps:
                if step.kind == "move" and (self.positions[step.src.mesh.id] or self.positions[step.dst.mesh.id]):
                    lost = self.tell(step, 0 if poison is None else poison.serial + 1)
                    poison = Poison(lost - 1, "an operator on another worker failed") if lost and not poison else poison
                inputs[slot] = self._step(step, inputs[slot])
        if poison is not None:
            self._keep_up(program, inputs)
            return poison
        if self.budget is not None:
            try:
                self.budget.admit(program)
            except torch.OutOfMemoryError:
                self._keep_up(program, inputs)
                raise
        if not plan.op:
            return [inputs[0]]
        generator = self.generators.get(numbers[-1]) if plan.random else None
        try:
            results = program.run(inputs, numbers[: plan.numbers - plan.random], generator, self._step, self._hold)
        except Exception:
            if not plan.rounds:  # how far a ring came is unknown: its peers run into the timeout
                self._keep_up(program, inputs)
            raise
        for k, steps in plan.after:
            local = [r[k] for r in results]
            for step in steps:
                local = self._step(step, local)
            for r, moved in zip(results, local, strict=True):
                r[k] = moved
        for slot, local in self._bring_back(plan, inputs):
            for mine, home in zip(given[slot], local, strict=True):
                mine.copy_(home)
        return [[r[k] for r in results] for k in range(len(plan.results))]

    def _answer(self, program: Program, commands: list[Any], i: int, found: Any, lost: Poison | None) -> None:
        """Tell the client, which waits for it, what the results of a dynamic plan are or why there are none."""
        if program.plan.dynamic and program.here and program.here[0] == 0:
            why = None if lost is None else [lost.serial, lost.text]
            self._reply([C.META, commands[i + program.width - 2], found, why])

    def _keep_up(self, program: Program, inputs: list[list[torch.Tensor]]) -> None:
        """Take part in what peers do after the call, and wait for, although this worker's values mean nothing."""
        plan = program.plan
        for step in program.sends():
            here = self.positions[step.src.mesh.id]
            self._step(step, [torch.zeros(step.src.local_shape(p), dtype=step.src.dtype, device=self.device) for p in here])
        for k, steps in plan.after:
            made = program.made[k]
            assert made is not None
            local = [torch.zeros(made.local_shape(p), dtype=made.dtype, device=self.device) for p in program.here]
            for step in steps:
                local = self._step(step, local)
        self._bring_back(plan, inputs)

    def _bring_back(self, plan: WirePlan, inputs: list[list[torch.Tensor]]) -> list[tuple[int, list[torch.Tensor]]]:
        """Written slots that were moved, in the placement they came from."""
        found = []
        for slot, steps in plan.back:
            local = inputs[slot]
            for step in steps:
                local = self._step(step, local)
            found.append((slot, local))
        return found

    def _step(self, step: Any, local: list[torch.Tensor]) -> list[torch.Tensor]:
        """One redistribution step; workers that host a device of neither mesh take no part."""
        if not self.positions[step.src.mesh.id] and not self.positions[step.dst.mesh.id]:
            return []
        moved = self.streams.communicate(lambda tensors: self.exchange(step, tensors), local)
        self._hold(moved)
        return moved

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        """Count tensors that are not in the store, or not yet, as long as they live."""
        if isinstance(self.store, MeteredStore):
            self.store.hold(tensors)

    def _value(self, tensor_id: int, spec: TensorSpec, poison: Poison | None) -> list[torch.Tensor]:
        value = self.store.get(tensor_id)
        if value is None or isinstance(value, Poison):
            if value is None and self.positions[spec.mesh.id]:
                raise ProtocolError(f"tensor {tensor_id} {spec} is not in the store of worker {self.index}.")
            return [
                torch.zeros(spec.local_shape(p), dtype=spec.dtype, device=self.device)
                for p in self.positions[spec.mesh.id]
            ]
        return value  # type: ignore[no-any-return]

    def failed(self, program: Program, commands: list[Any], i: int, serial: int, e: Exception) -> None:
        """Mark the results as lost to this failure, and tell the client unless an earlier failure caused it.

        Raises:
            CommError: it was that: how far the others came is unknown.
        """
        if isinstance(e, CommError):
            raise e
        plan = program.plan
        ids = commands[i : i + len(plan.slots)]
        first_out = commands[i + len(plan.slots) + plan.numbers] if program.takes_id else 0
        cause = next((v for x in ids if isinstance(v := self.store.get(x), Poison)), None)
        if cause is None:
            inputs = []
            for x, spec in zip(ids, plan.slots, strict=True):
                v = self.store.get(x)
                here = f" (here {tuple(v[program.at].shape)})" if isinstance(v, list) and program.at < len(v) else ""
                inputs.append(f"{spec}{here}")
            cause = self._report(serial, plan.op, plan.mesh, e, inputs, program.at)
            # What refuses its arguments does so on every device, and leaves them as they are or, as torch does, partly
            # written; they stay usable. Want of memory may hit one device alone.
            if not no_memory(e):
                ids = []
        program.poison(self.store, ids, first_out, cause)
        self._answer(program, commands, i, None, cause)

    def _report(self, serial: int, op: str, mesh: int, e: Exception, inputs: list[str], at: int = 0) -> Poison:
        """Tell the client what has failed on which of the devices here; returns what stands for the lost values."""
        text = "".join(traceback.format_exception(e))
        device = f"{self.device.type}:{self._device_of(mesh, at)}"
        kind = "OutOfMemoryError" if no_memory(e) else type(e).__name__
        self._reply([C.ERROR, serial, op, device, kind, str(e), text, inputs, self.within])
        return Poison(serial, f"{type(e).__name__}: {e}")

    def _device_of(self, mesh: int, at: int) -> int:
        here = self.positions[mesh]
        return self.meshes[mesh].devices[here[at]] if here else -1

    def _reply(self, header: list[Any], buffers: Sequence[memoryview] = ()) -> None:
        if self._muted and header[0] not in (C.ERROR, C.SAVED):
            self._muted -= 1
            return
        self._send([msgpack.packb(header), *buffers])

    # -- other commands: each gets the list, the index of its first operand and the frames; returns the next index ----
    def _mesh(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        mesh_id, shape, devices, workers = c[i : i + 4]
        layout = MeshLayout(mesh_id, tuple(shape), tuple(devices))
        self.meshes[mesh_id] = layout
        self.positions[mesh_id] = [p for p, w in enumerate(workers) if w == self.index]
        self.collectives.add_mesh(layout, workers)
        return i + 4

    def _spec(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.specs[c[i]] = decode_spec(c[i + 1], self.meshes)
        return i + 2

    def _plan(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        plan = decode_plan(c[i + 1], self.specs, decode)
        program = self.programs[c[i]] = Program(plan, self.positions, self.device)
        if self.budget is not None:
            program.simple = None  # which asks nobody
        return i + 2

    def _put(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        tensor_id, spec = c[i], self.specs[c[i + 1]]
        if self.positions[spec.mesh.id]:
            try:
                self._admit(tensor_id, spec)
                self.store[tensor_id] = self.local_parts(frames[c[i + 2]], spec)
            except Exception as e:  # no memory
                self.store[tensor_id] = Poison(_NO_OPERATOR, f"an upload of {spec} failed: {e}")
        return i + 3

    def _admit(self, tensor_id: int, spec: TensorSpec) -> None:
        """Before a tensor of the client's or of a file is made.

        Raises:
            torch.OutOfMemoryError: a device has no room for it.
        """
        if self.budget is not None:
            needs = [local_bytes(spec, p) for p in self.positions[spec.mesh.id]]
            self.budget.admit_bytes(dict(zip(self.budget.devices(spec.mesh.id), needs, strict=True)))
            self.budget.made(spec.mesh.id, [tensor_id])

    def local_parts(self, data: Any, spec: TensorSpec) -> list[torch.Tensor]:
        """The parts here of a tensor whose elements, in row-major order, are these bytes."""
        if 0 in spec.shape:
            full = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        else:
            full = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(spec.dtype).view(spec.shape)
        return [
            fresh(spec.local_shape(p), spec, self.device).copy_(piece_of(full, spec, p))
            for p in self.positions[spec.mesh.id]
        ]

    def _fetch(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        request, tensor_id, spec_id, wanted, path = c[i : i + 5]
        spec = self.specs[spec_id]
        here = self.positions[spec.mesh.id]
        if here and self._muted:  # the client has the value; its shared memory may serve another by now
            self._muted -= 1
        elif here:
            value = self.store.get(tensor_id)
            if isinstance(value, list):
                self._send_value(request, value, spec, [p for p in here if p in wanted], path)
            else:
                lost = value or Poison(_NO_OPERATOR, f"tensor {tensor_id} is unknown")
                self._reply([C.VALUE, request, self.index, [], [lost.serial, lost.text]])
        return i + 5

    def _send_value(
        self, request: int, value: list[torch.Tensor], spec: TensorSpec, wanted: list[int], path: str | None
    ) -> None:
        """Answer a request with the pieces at the wanted positions."""
        here = self.positions[spec.mesh.id]
        buffers: list[memoryview] = []
        try:
            if path is None:
                buffers = [as_bytes(value[here.index(p)]) for p in wanted]
            else:
                strides = dense_strides(spec.shape, spec.shape, spec.stride)
                whole = SharedMemory(path).tensor(0, spec.shape, strides, spec.dtype)
                for p in wanted:
                    for box, part in spec.parts(p):
                        copy(whole[slices(box)], value[here.index(p)][slices(part)])
        except Exception as e:  # no memory
            self._reply([C.VALUE, request, self.index, [], [_NO_OPERATOR, f"{spec} cannot be sent: {e}"]])
        else:
            self._reply([C.VALUE, request, self.index, wanted if path is None else [], None], buffers)

    def _seed(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.generators.seed(c[i], c[i + 1])
        return i + 2

    def _state(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        generator, tensor_id, spec_id = c[i : i + 3]
        here = self.positions[self.specs[spec_id].mesh.id]
        if here:
            state = self.generators.get(generator).get_state()
            self.store[tensor_id] = [state.clone() for _ in here]
        return i + 3

    def _restore(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        value = self.store.get(c[i + 1])
        if isinstance(value, list) and value:
            self.generators.get(c[i]).set_state(value[0].cpu())
        return i + 2

    def _sync(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self._reply([C.DONE, c[i], self.index, None])
        return i + 1

    def _memory(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        request, what = c[i : i + 2]
        if what == C.ANEW:
            self.store = MeteredStore(self.store)
        found: list[Any]
        if what == C.EACH:
            found = parts(self.store)
        elif what == C.SPARE:
            found = [give_back(self.device)]
        else:
            peak = self.store.meter.peak_bytes if isinstance(self.store, MeteredStore) else None
            found = [sum(blocks(self.store.values()).values()), peak]
        self._reply([C.VALUE, request, self.index, [self.index], None], [memoryview(msgpack.packb(found))])
        return i + 2

    def _limit(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.budget = Budget(c[i], self)
        return i + 1

    def _profile(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        request, goes_on = c[i : i + 2]
        self.profile = self.profile or Profile(self)
        measured = self.profile.take()
        if not goes_on:
            self.profile.end()
            self.profile = None
        self._reply([C.VALUE, request, self.index, [self.index], None], [memoryview(measured)])
        return i + 2

    def _count(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.serial = c[i]
        return i + 1

    def _map(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.files.map(c[i], c[i + 1])
        return i + 2

    def _open(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        request, number, path, size, mtime_ns = c[i : i + 5]
        refusal = None
        try:
            self.files.open(number, path, size, mtime_ns)
        except OSError as e:
            refusal = [type(e).__name__, str(e)]
        self._reply([C.DONE, request, self.index, refusal])
        return i + 5

    def _close(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.files.close(c[i])
        return i + 1

    def _load(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        tensor_id, spec_id, number, offset, dtype, part, name = c[i : i + 7]
        serial, self.serial = self.serial, self.serial + 1
        spec = self.specs[spec_id]
        here = self.positions[spec.mesh.id]
        value = self.store.get(tensor_id)
        if here and not isinstance(value, Poison):
            try:
                if value is None:
                    self._admit(tensor_id, spec)
                source = self.files.source(number) if number >= 0 else Bytes(frames[-number])
                self.store[tensor_id] = load(
                    source, offset, dtype_from(dtype), tuple(map(tuple, part)), spec, here, self.device, value
                )
            except Exception as e:
                self.store[tensor_id] = self._report(serial, f"loading {name}", spec.mesh.id, e, [])
        return i + 7

    def _save(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        if c[i + 1] is None:
            self.saves.end(c[i])
        else:
            self.saves.begin(c[i], c[i + 1])
        return i + 2

    def _write(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        save, file, tensor_id, spec_id, offset, wanted, last = c[i : i + 7]
        spec = self.specs[spec_id]
        here = self.positions[spec.mesh.id]
        value = self.store.get(tensor_id)
        if here and isinstance(value, list):
            try:
                pieces = [(value[here.index(p)], spec.parts(p)) for p in wanted if p in here]
                self.saves.write(save, file, offset, spec.shape, pieces)
            except Exception as e:  # no memory
                self.saves.fail(save, type(e).__name__, f"{spec} cannot be copied: {e}")
        elif here:  # lost on any device, it is lost
            text = f"what {file} is to hold was never made: {value.text}" if value else f"tensor {tensor_id} is unknown"
            self.saves.fail(save, "RemoteError", text)
        if last:
            self.saves.finish(save)
        return i + 7

    def _record(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        if c[i + 1] is None:
            self.records.pop(c[i], None)
        else:
            self.records[c[i]] = Record(decode_record(c[i + 1]), self)
        return i + 2

    def _replay(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        serial, self.serial = self.serial, self.serial + 1
        return self.records[c[i]].run(c, i + 1, serial)


def no_memory(e: Exception) -> bool:
    """Whether an operator failed for want of memory; torch's CPU allocator has no exception of its own."""
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e)


def as_bytes(t: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes on the host."""
    if t.numel() == 0:
        return memoryview(b"")
    flat = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride, which view(dtype) refuses
    return memoryview(flat.view(torch.uint8).numpy().data)
