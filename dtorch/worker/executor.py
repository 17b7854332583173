"""Runs a session's command stream on the devices of one worker."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import torch

from dtorch.core.errors import ProtocolError
from dtorch.core.spec import MeshLayout, TensorSpec, dense_strides
from dtorch.protocol import commands as C
from dtorch.protocol.plans import WirePlan, decode_plan
from dtorch.protocol.values import decode, decode_spec, dtype_name
from dtorch.worker.collectives import Collectives
from dtorch.worker.generators import Generators
from dtorch.worker.program import Poison, Program

Send = Callable[[list[bytes | memoryview]], None]


class Executor:
    """The state of one worker: meshes, plans, tensors, generators; and the loop over commands.

    Args:
        devices: global numbers of the devices hosted here.
        send: sends a reply (frames) towards the client.
        peers_dir: rendezvous directory for process groups, ``None`` when there are no other workers.
        index: this worker's number.
        physical: the torch device on which local tensors live.
    """

    def __init__(
        self, devices: Sequence[int], send: Send, peers_dir: str | None = None, index: int = 0, physical: str = "cpu"
    ) -> None:
        self.devices, self.index = list(devices), index
        self._send = send
        self.device = torch.device(physical)
        self.collectives = Collectives(index, peers_dir, device=self.device)
        self.generators = Generators(self.device)
        self.meshes: dict[int, MeshLayout] = {}
        self.positions: dict[int, list[int]] = {}
        self.specs: dict[int, TensorSpec] = {}
        self.programs: dict[int, Program] = {}
        self.store: dict[int, Any] = {}
        self.serial = 0  # operators seen so far, the client's numbering
        self._handlers: list[Callable[[list[Any], int, Sequence[memoryview]], int]] = [
            self._mesh, self._spec, self._plan, self._put, self._fetch, self._seed, self._state,
            self._restore, self._sync, self._count,
        ]  # fmt: skip

    def run(self, frames: Sequence[bytes | memoryview]) -> None:
        """Run one batch.

        Raises:
            ProtocolError: the batch does not follow the protocol; the session cannot go on.
        """
        commands = msgpack.unpackb(frames[0], strict_map_key=False)
        i, end = 0, len(commands)
        serial = self.serial
        programs, store, handlers = self.programs, self.store, self._handlers
        first, pop = C.FIRST_PLAN, store.pop
        with torch.inference_mode(False), torch.no_grad():
            while i < end:
                code = commands[i]
                if code >= first:
                    program = programs[code - first]
                    if program.simple is not None:
                        try:
                            i = program.simple(store, commands, i + 1)
                        except Exception as e:
                            self._failed(program, commands, i + 1, serial, e)
                            i += program.width
                    elif program.absent:
                        i += program.width
                    else:
                        try:
                            self._general(program, commands, i + 1)
                        except Exception as e:
                            self._failed(program, commands, i + 1, serial, e)
                        i += program.width
                    serial += 1
                elif code < 0:
                    pop(-code, None)
                    i += 1
                else:
                    self.serial = serial
                    i = handlers[code](commands, i + 1, frames)
                    serial = self.serial
        self.serial = serial

    def close(self) -> None:
        """Forget everything and leave the process groups."""
        self.store.clear()
        self.collectives.close()

    # -- operators ---------------------------------------------------------------------------------------------
    def _general(self, program: Program, commands: list[Any], i: int) -> None:
        """Run a program with moves, kernels, several local devices, dynamic or random results."""
        plan = program.plan
        n = len(plan.slots)
        ids = commands[i : i + n]
        numbers = commands[i + n : i + n + plan.numbers]
        first_out = commands[i + n + plan.numbers] if program.takes_id else 0
        poison = next((v for x in ids if isinstance(v := self.store.get(x), Poison)), None)
        inputs = [self._value(x, spec, poison) for x, spec in zip(ids, plan.slots, strict=True)]
        for slot, steps in plan.moves:
            for step in steps:
                inputs[slot] = self._step(step, inputs[slot])
        if poison is not None:
            self._bring_back(plan, inputs)  # peers do, and wait for this worker, although its values mean nothing
            program.poison(self.store, ids, first_out, poison)
            return
        if not plan.op:
            self.store[first_out] = inputs[0]
            return
        generator = self.generators.get(numbers.pop()) if plan.random else None
        try:
            results = program.run(inputs, numbers, generator)
        except Exception:
            self._bring_back(plan, inputs)  # as above
            raise
        for slot, local in self._bring_back(plan, inputs):
            for mine, home in zip(self.store[ids[slot]], local, strict=True):
                mine.copy_(home)
        new = first_out
        for k, result in enumerate(plan.results):
            if result.same is None:
                self.store[new] = [r[k] for r in results]
                new += 1
        if plan.dynamic:
            request = commands[i + program.width - 2]
            if self.positions[plan.mesh][0] == 0:
                found = [[list(t.shape), list(t.stride()), dtype_name(t.dtype)] for t in results[0]]
                self._reply([C.META, request, found])

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
        return self.collectives.run(step, local)

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

    def _failed(self, program: Program, commands: list[Any], i: int, serial: int, e: Exception) -> None:
        """Mark the results as lost to this failure, and tell the client unless an earlier failure caused it."""
        plan = program.plan
        ids = commands[i : i + len(plan.slots)]
        first_out = commands[i + len(plan.slots) + plan.numbers] if program.takes_id else 0
        cause = next((v for x in ids if isinstance(v := self.store.get(x), Poison)), None)
        if cause is None:
            shapes = []
            for x in ids:
                v = self.store.get(x)
                shapes.append([list(t.shape) for t in v] if isinstance(v, list) else [])
            cause = Poison(serial, f"{type(e).__name__}: {e}")
            text = "".join(traceback.format_exception(e))
            device = f"{self.device.type}:{self._device_of(plan.mesh)}"
            kind = "OutOfMemoryError" if no_memory(e) else type(e).__name__
            self._reply([C.ERROR, serial, plan.op, device, kind, str(e), text, shapes])
            # What refuses its arguments does so on every device, and leaves them as they are or, as torch does, partly
            # written; they stay usable. Want of memory may hit one device alone.
            if not no_memory(e):
                ids = ()
        program.poison(self.store, ids, first_out, cause)
        if plan.dynamic and self.positions[plan.mesh] and self.positions[plan.mesh][0] == 0:
            self._reply([C.META, commands[i + program.width - 2], None])

    def _device_of(self, mesh: int) -> int:
        layout = self.meshes[mesh]
        return layout.devices[self.positions[mesh][0]] if self.positions[mesh] else -1

    def _reply(self, header: list[Any], buffers: Sequence[memoryview] = ()) -> None:
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
        self.programs[c[i]] = Program(plan, self.positions, self.device)
        return i + 2

    def _put(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        tensor_id, spec = c[i], self.specs[c[i + 1]]
        positions = self.positions[spec.mesh.id]
        if positions:
            full = torch.empty(spec.shape, dtype=spec.dtype)
            if full.numel():
                flat = torch.frombuffer(bytearray(frames[c[i + 2]]), dtype=torch.uint8)
                full = flat.view(spec.dtype).view(spec.shape)
            local = []
            for p in positions:
                piece = full[tuple(slice(a, b) for a, b in spec.box(p))] if spec.shape else full
                out = torch.empty_strided(
                    piece.shape,
                    dense_strides(piece.shape, spec.shape, spec.stride),
                    dtype=spec.dtype,
                    device=self.device,
                )
                local.append(out.copy_(piece))
            self.store[tensor_id] = local
        return i + 3

    def _fetch(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        request, tensor_id, spec_id, wanted = c[i : i + 4]
        here = self.positions[self.specs[spec_id].mesh.id]
        if here:
            value = self.store.get(tensor_id)
            if isinstance(value, Poison) or value is None:
                text = value.text if isinstance(value, Poison) else f"tensor {tensor_id} is unknown"
                serial = value.serial if isinstance(value, Poison) else -1
                self._reply([C.VALUE, request, self.index, [], [serial, text]])
            else:
                sent = [p for p in here if p in wanted]
                buffers = [as_bytes(value[here.index(p)]) for p in sent]
                self._reply([C.VALUE, request, self.index, sent, None], buffers)
        return i + 4

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
        self._reply([C.DONE, c[i], self.index])
        return i + 1

    def _count(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        self.serial = c[i]
        return i + 1


def no_memory(e: Exception) -> bool:
    """Whether an operator failed for want of memory; torch's CPU allocator has no exception of its own."""
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(e)


def as_bytes(t: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes on the host."""
    if t.numel() == 0:
        return memoryview(b"")
    flat = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride, which view(dtype) refuses
    return memoryview(flat.view(torch.uint8).numpy())
