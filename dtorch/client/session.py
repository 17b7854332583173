"""A session: the ordered command stream from this process to its workers, and the replies that come back.

Threads: any thread may append commands (``list.extend`` is atomic under the interpreter lock); sending and receiving
happen under one lock, by whichever thread needs it. A small timer thread flushes what has waited too long.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack
import torch

from dtorch.client.errors import remote_error
from dtorch.client.files import OpenFiles
from dtorch.client.plans import Plans
from dtorch.client.request import Request
from dtorch.client.shared import Arena, Segment
from dtorch.client.sites import Sites, caller, site_within, thread_of
from dtorch.core.config import SessionConfig
from dtorch.core.errors import DtorchError, RemoteError, SessionClosedError, WorkerLostError
from dtorch.core.mesh import DeviceMesh, axis_kinds
from dtorch.core.placements import Placement
from dtorch.core.spec import ROLLED, MeshLayout, TensorSpec
from dtorch.protocol import commands as C
from dtorch.protocol.link import Ack, Link, Reply, Restarting, WorkerLost, WorkerUp
from dtorch.protocol.values import encode_spec

# A batch leaves when the stream holds this many values (about 64 operators), or after _LINGER_S; while workers have
# enough to do, more go together: each costs the controller a message for every worker.
_BATCH_VALUES = 320
_BUSY_VALUES = 4 * _BATCH_VALUES
_LINGER_S = 0.002
# So long after a value turns out to be lost the report of the failure may come.
_REPORT_S = 2.0
# While the program computes nothing, this often the workers hear which tensors it has dropped.
_IDLE_S = 1.0
# The client runs ahead of the slowest worker by at most this many batches, operators, or bytes of uploads.
_WINDOW = 256
_WINDOW_OPS = 16_384
_WINDOW_BYTES = 256 << 20
# Looking for acknowledgements costs as much as sending; whoever waits for something looks anyway.
_UNSEEN = 4
MAX_MESHES = 64

_numbers = itertools.count(1)
_log = logging.getLogger("dtorch")


class Session:
    """The stream, the ids, the meshes and specs known to the workers, and the plans made so far.

    Attributes:
        number: of the session within this process.
        buf: commands not sent yet.
        limit: length of ``buf`` beyond which ``emitted`` must be called.
        ids: next free tensor id.
        plans: call key -> ready plan.
        reads: how often the program waited for values, or for shapes that depend on values.
        recorder: notes everything that is sent while a call is being captured.
        wire_plans: plan number -> its form on the wire.
        records: number -> form on the wire of the records in use, for workers that join later.
    """

    def __init__(self, link: Link, config: SessionConfig) -> None:
        self.link, self.config = link, config
        self._thread = threading.get_ident()
        self.pid, self.number = os.getpid(), next(_numbers)
        self.lock = threading.RLock()
        self.buf: list[Any] = []
        self.frames: list[bytes | memoryview] = []
        self.shares = False  # whether the next batch names memory of this process
        self.sites = Sites()
        self.ids: Callable[[], int] = itertools.count(1).__next__
        self.plans = Plans()
        self.closed: str | None = None
        self.workers: dict[int, WorkerUp] = {}
        self.observer: Any = None
        self.recorder: Any = None
        self.wire_plans: dict[int, list[Any]] = {}
        self.records: dict[int, list[Any]] = {}
        self.files = OpenFiles(self)
        self.arena = Arena(self)
        self._requests: dict[int, Request] = {}
        self._request_ids = itertools.count(1)
        self._meshes: list[DeviceMesh] = []
        self._layouts: dict[Any, MeshLayout] = {}
        self._spec_ids: dict[TensorSpec, int] = {}
        self._plan_ids = itertools.count()
        self._definitions: list[Any] = []
        self._rolled: set[int] = set()
        self._device_worker: dict[int, int] = {}
        self._seq = 0
        self._acked = 0
        self._sent_ops: deque[tuple[int, int, int]] = deque()  # (seq, ops sent up to it, bytes)
        self._site_base = 0
        self._bytes = 0
        self._failures: deque[tuple[RemoteError, int | None]] = deque()  # with the thread that issued the operator
        self._by_serial: dict[int, RemoteError] = {}
        self._flushes = 0
        self.reads = 0
        self._immediate = config.mode == "inline"
        self._wake = threading.Event()
        self.limit = -1
        self._timer: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forked)

    # -- meshes and specs -------------------------------------------------------------------------------------------
    def layout(self, mesh: DeviceMesh) -> MeshLayout:
        """The mesh's layout in this session; tells the workers of it on first use.

        Raises:
            SessionClosedError: the session is over.
            DtorchError: too many meshes, or devices that the workers do not have.
        """
        if mesh._layout_id is not None and mesh._graph is self:
            return mesh._layout_id
        with self.lock:
            found = self._layouts.get(mesh.key)
            if found is None:
                self.check_open()
                if len(self._meshes) >= MAX_MESHES:
                    raise DtorchError(
                        f"A session can use {MAX_MESHES} different meshes, and {mesh} would be one more. "
                        "Use the same mesh again, or end the session with dtorch.shutdown()."
                    )
                workers = self._place(mesh)
                found = MeshLayout(len(self._meshes), tuple(mesh.mesh.shape), mesh.devices, axis_kinds(mesh), self.number)
                self._layouts[mesh.key] = found
                self._meshes.append(mesh)
                self.define(C.MESH, found.id, list(found.shape), list(found.devices), workers)
            mesh._layout_id, mesh._graph = found, self
            return found

    def mesh(self, index: int) -> DeviceMesh:
        """The mesh of device ``dtorch:index``.

        Raises:
            DtorchError: there is none yet.
        """
        if not 0 <= index < len(self._meshes):
            raise DtorchError(
                f"There is no device dtorch:{index}: {len(self._meshes)} meshes are in use. "
                "dtorch:k is the k-th mesh of the session; make one with dtorch.DeviceMesh or dtorch.init_device_mesh."
            )
        return self._meshes[index]

    @property
    def mesh_count(self) -> int:
        """Number of meshes in use."""
        return len(self._meshes)

    def _place(self, mesh: DeviceMesh) -> list[int]:
        """Workers of the mesh's devices; starts workers for devices that have none."""
        if mesh.device_type not in ("cpu", self.config.device_type):
            raise DtorchError(
                f"{mesh} wants devices of type {mesh.device_type!r}; the workers of this session have "
                f"{self.config.device_type!r}."
            )
        limit = self.config.max_devices
        if limit is not None and max(mesh.devices) >= limit:
            raise DtorchError(f"{mesh} names device {max(mesh.devices)}; this session has devices 0 to {limit - 1}.")
        missing = [d for d in mesh.devices if d not in self._device_worker]
        if missing:
            self.flush()
            known = set(self._device_worker.values())
            assigned = self.link.assign(missing)
            self._device_worker.update(assigned)
            joined = sorted(set(assigned.values()) - known)
            if joined and self._definitions:
                records = [x for number, data in self.records.items() for x in (C.RECORD, number, data)]
                self._send([*self._definitions, *records, C.COUNT, self.issued], [], 0, joined)
        return [self._device_worker[d] for d in mesh.devices]

    @property
    def issued(self) -> int:
        """Number of operators issued so far."""
        return self._site_base + len(self.sites)

    def take_ids(self, count: int) -> int:
        """The first of ``count`` consecutive ids; other threads take theirs without a lock."""
        while True:
            first = self.ids()
            if all(self.ids() == first + k for k in range(1, count)):
                return first

    @property
    def worker_count(self) -> int:
        """Number of workers that host devices of the meshes in use."""
        return len(set(self._device_worker.values()))

    def workers_of(self, layout: MeshLayout) -> set[int]:
        """The workers that host devices of the mesh."""
        return {self._device_worker[d] for d in layout.devices}

    def make_spec(
        self, mesh: MeshLayout, placements: tuple[Placement, ...], shape: Sequence[int], stride: Sequence[int],
        dtype: torch.dtype,
    ) -> TensorSpec:  # fmt: skip
        """The spec of these values."""
        return TensorSpec(mesh, placements, tuple(shape), tuple(stride), dtype)

    def spec_id(self, spec: TensorSpec) -> int:
        """Number of the spec on the wire; sends it on first use."""
        number = self._spec_ids.get(spec)
        if number is None:
            with self.lock:
                number = self._spec_ids.get(spec)
                if number is None:
                    self._know(spec.mesh)
                    number = len(self._spec_ids)
                    self.define(C.SPEC, number, encode_spec(spec))
                    self._spec_ids[spec] = number  # last: whoever sees the number may use it
        return number

    def _know(self, layout: MeshLayout) -> None:
        """Tell the workers of a layout that a plan made (a rolled one)."""
        if layout.id >= ROLLED and layout.id not in self._rolled:
            self._rolled.add(layout.id)
            workers = [self._device_worker[d] for d in layout.devices]
            self.define(C.MESH, layout.id, list(layout.shape), list(layout.devices), workers)

    def send_plan(self, data: list[Any]) -> int:
        """Send an encoded plan; returns the command code that runs it."""
        if threading.get_ident() != self._thread:
            self.sites.note_threads()
        number = next(self._plan_ids)
        self.wire_plans[number] = data
        self.define(C.PLAN, number, data)
        return number + C.FIRST_PLAN

    def known_specs(self) -> dict[int, TensorSpec]:
        """The specs that the workers know, by number."""
        return {number: spec for spec, number in self._spec_ids.items()}

    def define(self, *command: Any) -> None:
        """Append a command that workers which join later must hear as well."""
        with self.lock:
            self._definitions.extend(command)
            self.buf.extend(command)

    # -- the stream -------------------------------------------------------------------------------------------------
    def emitted(self) -> None:
        """To be called after commands were appended: sends when enough has gathered.

        Raises:
            SessionClosedError, WorkerLostError: the session is over.
        """
        if self.closed is not None:
            self.check_open()
        if self._immediate or len(self.buf) > self.limit >= 0:
            self.flush()
        elif self.limit < 0:
            self._start_timer()

    def upload(self, tensor_id: int, spec: TensorSpec, data: bytes | memoryview) -> None:
        """Append a PUT of these bytes (row-major, of the global tensor)."""
        with self.lock:
            number = self.spec_id(spec)
            self.frames.append(data)
            self._bytes += len(data)
            self.buf.extend((C.PUT, tensor_id, number, len(self.frames)))
            if self._bytes > _WINDOW_BYTES // 4:
                self.flush()
        self.emitted()

    def flush(self) -> int:
        """Send everything appended so far; waits while the window is full. Returns the number of the last batch.

        Raises:
            SessionClosedError, CommError, WorkerLostError: the session cannot go on.
        """
        with self.lock:
            self.check_open()
            n = len(self.buf)
            if not n:
                return self._seq
            commands = self.buf[:n]
            del self.buf[:n]
            frames, self.frames = self.frames, []
            size, self._bytes = self._bytes, 0
            if self.recorder is not None:
                self.recorder.sent(commands, frames)
            self._flushes += 1
            self._send(commands, frames, size)
            if self._seq - self._acked > _UNSEEN:
                self._drain(0.0)
            if self.limit >= 0:
                self.limit = _BATCH_VALUES if self._seq - self._acked <= _UNSEEN else _BUSY_VALUES
            while self._is_ahead() and self._drain(None):
                pass
            return self._seq

    def _is_ahead(self) -> bool:
        """Whether the window is full."""
        sent = self._sent_ops
        return len(sent) > _WINDOW or bool(sent and len(self.sites) > _WINDOW_OPS) or sum(b for _, _, b in sent) > _WINDOW_BYTES

    def acknowledged(self, seq: int) -> None:
        """Wait until all live workers have run every batch up to ``seq``.

        Raises:
            SessionClosedError, CommError, WorkerLostError: they never will.
        """
        with self.lock:
            while self._acked < seq:
                self.check_open()
                self._drain(None)

    def _send(
        self, commands: list[Any], frames: list[bytes | memoryview], size: int, targets: Sequence[int] | None = None
    ) -> None:
        self._seq += 1
        self._sent_ops.append((self._seq, self.issued, size))
        shared, self.shares = self.shares, False
        self.link.send_batch(self._seq, [msgpack.packb(commands), *frames], targets, shared)

    def _drain(self, timeout_s: float | None) -> bool:
        """Handle what has arrived; waits for the first message up to ``timeout_s``. Whether there was any."""
        event = self.link.receive(timeout_s)
        found = event is not None
        while event is not None:
            self._handle(event)
            event = self.link.receive(0.0)
        return found

    def _handle(self, event: Any) -> None:
        if isinstance(event, Ack):
            self._acked = max(self._acked, event.seq)
            while self._sent_ops and self._sent_ops[0][0] <= self._acked:
                _, ops, _ = self._sent_ops.popleft()
                # A failed operator's report arrives before its batch is acknowledged.
                while self._site_base < ops and self.sites:
                    self.sites.popleft()
                    self._site_base += 1
        elif isinstance(event, Reply):
            self._reply(event.frames)
        elif isinstance(event, Restarting):
            _log.warning(
                "Worker %d (pid %d, devices %s) was lost: %s. All workers start again and repeat what is needed.",
                event.index, event.pid, list(event.devices), event.reason,
            )  # fmt: skip
        elif isinstance(event, WorkerUp):
            self.workers[event.index] = event
        elif isinstance(event, WorkerLost):
            up = self.workers.pop(event.index, None)
            pid, devices = (event.pid, event.devices) if event.pid or up is None else (up.pid, up.devices)
            *before, last = event.reason.strip().splitlines() or [""]
            self._details = event.reason if before else ""
            self._end(
                f"Worker {event.index} (pid {pid}, devices {list(devices)}) was lost: {last.rstrip('.')}.",
                WorkerLostError,
            )

    def _reply(self, frames: Sequence[Any]) -> None:
        header = msgpack.unpackb(frames[0])
        kind = header[0]
        if kind == C.ERROR:
            self._failed(header)
            return
        request = self._requests.get(header[1])
        if request is None:
            return
        if kind == C.META:
            request.meta, request.lost = header[2:4]
            request.expected = 0
        elif kind in (C.DONE, C.SAVED):
            request.refusals.extend(filter(None, header[3:]))
            request.expected -= header[2] not in request.parts  # a worker that was started again may say it again
            request.parts[header[2]] = memoryview(b"")
        else:
            _, _, _, positions, lost = header
            request.lost = request.lost or lost
            for position, data in zip(positions, frames[1:], strict=True):
                request.parts[position] = memoryview(data)
            request.expected -= 1
        if request.expected <= 0:
            self._complete(header[1], request)

    def _complete(self, number: int, request: Request) -> None:
        request.done = True
        self._requests.pop(number, None)
        for callback in request.callbacks:
            callback()

    def _failed(self, header: list[Any]) -> None:
        _, serial, op, device, kind, text, trace, shapes, step = header
        index = serial - self._site_base
        site = self.sites[index] if 0 <= index < len(self.sites) else None
        if step is not None and site is not None:
            site = site_within(site, step)
        error = remote_error(op, device, kind, text, trace, shapes, site)
        if serial not in self._by_serial:
            self._by_serial[serial] = error
            self._failures.append((error, thread_of(site)))
            while len(self._by_serial) > 1000:
                self._by_serial.pop(next(iter(self._by_serial)))

    def _lost(self, serial: int, text: str) -> DtorchError:
        deadline = time.monotonic() + _REPORT_S
        while serial not in self._by_serial and serial >= 0 and time.monotonic() < deadline:
            with self.lock:  # the report of the worker that failed may come after the word of one that it told
                self._drain(0.01)
        cause = self._by_serial.get(serial)
        if cause is None:
            return RemoteError(f"This value was never made: {text}.")
        for failure in list(self._failures):
            if failure[0] is cause:
                self._failures.remove(failure)
                return cause.again()
        return cause.again("This value was never made, because of an earlier failure: ")

    # -- waiting ----------------------------------------------------------------------------------------------------
    def request(self, expected: int) -> tuple[int, Request]:
        """A new request that ``expected`` workers will answer."""
        if self.recorder is not None:
            self.recorder.block("it reads a value that only the workers know", caller(sys._getframe(1)))
        if threading.get_ident() != self._thread:
            self.sites.note_threads()
        number, request = next(self._request_ids), Request(expected)
        self._requests[number] = request
        return number, request

    def fetch(
        self, tensor_id: int, spec: TensorSpec, positions: Sequence[int], segment: Segment | None = None
    ) -> Request:
        """Ask for the pieces at these positions of the mesh, in the reply or in shared memory; flushes."""
        number, request = self.request(len(self.workers_of(spec.mesh)))
        request.segment = segment
        path = None if segment is None else segment.path
        self.buf.extend((C.FETCH, number, tensor_id, self.spec_id(spec), list(positions), path))
        self.flush()
        return request

    def synchronize(self) -> None:
        """Wait until every worker has done all that was asked of it; raises what failed on the way."""
        number, request = self.request(self.worker_count)
        if not request.expected:
            return
        self.buf.extend((C.SYNC, number))
        self.flush()
        self.wait(request, None)
        if request.error is not None:
            raise request.error
        self.raise_failure()

    def wait(self, request: Request, timeout_s: float | None) -> bool:
        """Wait for a request; false when the time ran out first.

        Raises:
            SessionClosedError, CommError, WorkerLostError: the answer will never come.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not request.done:
            self.check_open()
            left = None if end is None else end - time.monotonic()
            if left is not None and left < 0:
                return False
            if self.lock.acquire(timeout=0.005 if left is None else min(0.005, left + 1e-4)):
                try:
                    if not request.done:
                        # In short turns, so that other waiting threads see what arrives for them.
                        self._drain(0.05 if left is None else min(0.05, left))
                finally:
                    self.lock.release()
        return True

    def finish(self, request: Request) -> None:
        """Wait for a request's answer; raises what prevented it, or what else failed until then."""
        self.reads += 1
        self.wait(request, None)
        if request.error is not None:
            raise request.error
        if request.lost is not None:
            raise self._lost(*request.lost)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the oldest failure that no one has seen yet; not that of another thread, which will meet it itself."""
        for failure in list(self._failures):
            error, thread = failure
            if thread is None or thread == threading.get_ident() or thread not in {t.ident for t in threading.enumerate()}:
                self._failures.remove(failure)
                raise error.again()

    # -- the end ----------------------------------------------------------------------------------------------------
    def check_open(self) -> None:
        """Raise when the session is over.

        Raises:
            SessionClosedError: it was shut down, or this process is a fork.
            WorkerLostError: a worker was lost.
        """
        if self.closed is not None:
            raise self._closing()

    def _closing(self) -> DtorchError:
        error = self._closed_type(self.closed)
        if self._details:
            error.add_note(self._details)
        return error

    _closed_type: type[DtorchError] = SessionClosedError
    _details = ""  # the traceback of a worker that met a fault of dtorch's own

    def _end(self, why: str, kind: type[DtorchError]) -> None:
        if self.closed is None:
            self.closed, self._closed_type = why, kind
            self.limit = -1  # the next operator is told
            for number, request in list(self._requests.items()):
                request.error = self._closing()
                self._complete(number, request)

    def close(self) -> None:
        """End the session: workers and controller stop, waiting futures fail. Idempotent."""
        if os.getpid() != self.pid:
            return
        with self.lock:
            self._end(
                "This session was shut down; its tensors are gone. The next use starts a new one.", SessionClosedError
            )
            self.files.forget()
            self.buf.clear()
            self.frames.clear()
        self._wake.set()
        self.link.close()
        self.arena.close()

    def _forked(self) -> None:
        self.lock = threading.RLock()
        self.closed = (
            "This process is a fork of the program that started the session, and cannot use it. "
            "Start the session after forking, or keep its use in the parent."
        )
        self._closed_type = SessionClosedError
        self.limit = -1

    # -- the timer --------------------------------------------------------------------------------------------------
    def _start_timer(self) -> None:
        with self.lock:
            if self._timer is None:
                self._timer = threading.Thread(target=self._tick, name="dtorch-flush", daemon=True)
                self._timer.start()
            self.limit = _BATCH_VALUES
            self._wake.set()

    def _quietly(self, do: Callable[[], Any]) -> None:
        """Do something on the timer's thread; when that ends the session, its users are told at their next call."""
        try:
            do()
        except DtorchError as error:
            with self.lock:
                self._end(str(error), type(error))

    def _tick(self) -> None:
        """Flush what has waited for a turn; sleep soundly while nothing happens."""
        idle, seen = 0, -1
        while self.closed is None:
            time.sleep(_LINGER_S)
            if self.buf and self._flushes == seen:
                idle = 0
                self._quietly(self.flush)
            elif not self.buf and not self._requests:
                idle += 1
            if self._requests and self.lock.acquire(blocking=False):
                try:
                    self._quietly(partial(self._drain, 0.0))
                finally:
                    self.lock.release()
            seen = self._flushes
            if idle > 250:
                if self.files.forget():
                    continue
                self._wake.clear()
                self.limit = -1
                while not self._wake.wait(_IDLE_S):
                    if self.buf and self.closed is None:  # tensors have been dropped, which wakes nobody
                        self._quietly(self.flush)
                idle = 0
