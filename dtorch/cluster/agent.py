"""``dtorch worker``: offers a machine's devices to a pool, and hosts the workers of its sessions.

This process only carries bytes and watches; what clients ask for runs in processes that the zygote forks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from dtorch.cluster.endpoint import BEAT_S, SILENCE_S, Connection, Loop
from dtorch.cluster.options import MEETING, WorkerOptions
from dtorch.cluster.stream import Stream
from dtorch.cluster.zygote import Zygote
from dtorch.core.errors import CommError, ProtocolError
from dtorch.launch.template import load_factory
from dtorch.protocol.codec import decode, encode
from dtorch.protocol.messages import Exited, Fork, Forked, Kill, Stop, Stopped
from dtorch.protocol.pool import (
    POOL_VERSION,
    Beat,
    Consumed,
    Data,
    Ended,
    ForTemplate,
    Host,
    Join,
    Joined,
    Leave,
    Meet,
    Meeting,
    PoolMessage,
    Refused,
    pack,
    unpack,
)

_MAX_REPORT_BYTES = 1 << 18
_EXECUTOR = "dtorch.cluster.executor:PoolExecutor"


@dataclass
class _Template:
    """The processes of a session on this machine that have devices of one type."""

    control: socket.socket
    lifeline: int
    living: dict[int, Stream] = field(default_factory=dict)  # workers asked for and not reported as ended
    exits: dict[int, Exited] = field(default_factory=dict)  # to be reported when their last words are


@dataclass
class _Session:
    number: int
    directory: Path
    template: _Template | None = None
    store: Any = None


class Agent:
    """Serves one gate, and joins it again whenever the connection breaks; sessions end with the connection.

    Args:
        options: what the machine offers.
        zygote: forks.
        scratch: a directory for sessions' directories.
        say: told what happens, in a line.
    """

    def __init__(self, options: WorkerOptions, zygote: Zygote, scratch: Path, say: Callable[[str], None]) -> None:
        self._options, self._zygote, self._scratch, self._say = options, zygote, scratch, say
        self._loop = Loop()
        self._sessions: dict[int, _Session] = {}
        self._streams: dict[int, Stream] = {}
        self._name = ""
        self._breaks = 0
        self._heard_s = self._told_s = 0.0
        self._connection = Connection(options.controller, options.keys, "worker")
        self._connection.watch(self._loop, self._on_gate)
        self._loop.watch(zygote.fileno(), self._on_zygote)
        self._join()

    def step(self) -> None:
        """Wait for something, and handle it.

        Raises:
            CommError: the pool does not take this machine, or the machine can host no workers any more.
        """
        self._loop.step(BEAT_S / 2)
        now_s = time.monotonic()
        if self._connection.refused:
            raise CommError(
                f"The controller at {self._options.controller} does not know the key in {self._options.keys}."
            )
        if self._connection.breaks != self._breaks or (self._name and now_s - self._heard_s > SILENCE_S):
            self._breaks = self._connection.breaks
            if self._name:
                self._say("the controller is gone; its sessions end here")
            self._join()
        if now_s - self._told_s >= BEAT_S:
            self._told_s = now_s
            self._tell(Beat(1))

    def close(self) -> None:
        """End all that runs here, and leave the pool."""
        for number in list(self._sessions):
            self._forget(number)
        self._connection.close()
        self._zygote.close()

    def _join(self) -> None:
        for number in list(self._sessions):
            self._forget(number)
        self._name = ""
        options = self._options
        host = socket.gethostname()
        self._tell(Join(POOL_VERSION, host, os.getpid(), options.data_address, options.devices))

    def _tell(self, message: PoolMessage | ForTemplate) -> None:
        self._connection.send(pack(message))

    # From the gate

    def _on_gate(self) -> None:
        for frame in self._connection.receive():
            self._heard_s = time.monotonic()
            message = unpack(frame)
            if isinstance(message, Data | Consumed | Ended):
                self._on_stream(message)
            elif isinstance(message, Joined):
                self._name = message.name
                self._say(f"joined {self._options.controller} with {', '.join(self._options.devices)}")
            elif isinstance(message, Refused):
                raise CommError(f"The controller at {self._options.controller} refused this machine: {message.text}.")
            elif isinstance(message, Host):
                self._host(message)
            elif isinstance(message, ForTemplate):
                self._pass_on(message)
            elif isinstance(message, Meet):
                self._meet(message.session)
            elif isinstance(message, Leave):
                self._forget(message.session, for_good=True)
            elif not isinstance(message, Beat):
                raise ProtocolError(f"a gate does not send {type(message).__name__}")

    def _on_stream(self, message: Data | Consumed | Ended) -> None:
        stream = self._streams.get(message.stream)
        if stream is None:
            return  # its worker has ended meanwhile
        if isinstance(message, Data):
            stream.data(message.position, message.data)
        elif isinstance(message, Consumed):
            stream.consumed(message.position)
        else:
            stream.ended(message.text)
        self._watch(stream)

    def _session(self, number: int) -> _Session:
        found = self._sessions.get(number)
        if found is None:
            directory = self._scratch / f"dtorch-{self._name}-{number}"
            (directory / f"peers-{os.getpid()}").mkdir(parents=True, exist_ok=True)
            found = self._sessions[number] = _Session(number, directory)
        return found

    def _host(self, host: Host) -> None:
        session = self._session(host.session)
        kind, _, number = self._options.devices[host.slot].partition(":")
        template = session.template or self._start(session, kind)
        peers = session.directory / f"peers-{os.getpid()}" / str(host.generation)
        peers.mkdir(exist_ok=True)
        meeting = {
            "store": host.meeting, "address": self._options.data_address, "tensors": self._options.tensors,
            "snapshots": str(session.directory / "snapshots"), "generation": host.generation,
        }  # fmt: skip
        (peers / MEETING).write_text(json.dumps(meeting), encoding="utf-8")
        threads = max(1, min(host.threads, len(os.sched_getaffinity(0))))
        env = {"OMP_NUM_THREADS": str(threads)}
        if kind == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = number  # not read before CUDA is used, which only workers do
        ours, theirs = socket.socketpair()
        stream = Stream(host.stream, ours, self._connection.send)
        self._streams[host.stream] = template.living[host.index] = stream
        self._watch(stream)
        fork = Fork(host.index, host.devices, threads, env, host.generation)
        try:
            socket.send_fds(template.control, [encode(fork)], [theirs.fileno()])
        except OSError:
            return  # the template has ended, which its connection tells
        finally:
            theirs.close()

    def _start(self, session: _Session, kind: str) -> _Template:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, lifeline = os.pipe()
        self._zygote.start(theirs, read_end, kind, str(session.directory / f"peers-{os.getpid()}"))
        session.template = _Template(control, lifeline)
        self._loop.watch(control.fileno(), lambda *_: self._on_template(session))
        return session.template

    def _pass_on(self, message: ForTemplate) -> None:
        session = self._sessions.get(message.session)
        template = None if session is None else session.template
        if not isinstance(message.message, Kill | Stop):
            raise ProtocolError(f"a gate sends no {type(message.message).__name__} for a template")
        if template is None:
            if isinstance(message.message, Stop):
                self._tell(Leave(message.session))
            return
        try:
            template.control.send(encode(message.message), socket.MSG_NOSIGNAL)
        except OSError:
            return  # the template has ended, which its connection tells

    def _meet(self, number: int) -> None:
        """Open a store, on the address for data alone, in which the session's workers find each other."""
        import torch.distributed as dist

        session, address = self._session(number), self._options.data_address
        if session.store is None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.bind((address, 0))
            listener.listen()
            port = listener.getsockname()[1]
            session.store = dist.TCPStore(  # type: ignore[attr-defined]
                address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60),
                master_listen_fd=listener.detach(),
            ), port  # fmt: skip
        self._tell(Meeting(number, f"{address}:{session.store[1]}"))

    # From the session's processes

    def _on_template(self, session: _Session) -> None:
        template = session.template
        if template is None:
            return
        try:
            data = template.control.recv(_MAX_REPORT_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._ended(session, template)
            return
        message = decode(data)
        if isinstance(message, Exited):
            template.exits[message.index] = message
            self._report_exits(session, template)
        elif isinstance(message, Forked | Stopped):
            self._tell(ForTemplate(session.number, message))

    def _report_exits(self, session: _Session, template: _Template, forced: bool = False) -> None:
        """Report the ends of workers all whose last words are on their way."""
        for index, message in list(template.exits.items()):
            stream = template.living.get(index)
            if stream is not None and not stream.local_ended and not forced:
                stream.readable()  # the window may be full: then when it opens
                if not stream.local_ended:
                    self._watch(stream)
                    continue
            del template.exits[index]
            if stream is not None:
                del template.living[index]
                self._close(stream)
            self._tell(ForTemplate(session.number, message))

    def _ended(self, session: _Session, template: _Template) -> None:
        """The template has ended, as it was asked to or not, and its workers with it."""
        session.template = None
        self._loop.unwatch(template.control.fileno())
        template.control.close()
        os.close(template.lifeline)
        for index in template.living:
            template.exits.setdefault(
                index, Exited(index, "the template process on its machine ended, and its workers with it")
            )
        self._report_exits(session, template, forced=True)
        self._tell(Leave(session.number))

    def _on_zygote(self, *_: bool) -> None:
        raise CommError("The process that forks workers has ended.")

    # Streams

    def _watch(self, stream: Stream) -> None:
        if not stream.closed:
            self._loop.watch(stream.local.fileno(), lambda r, w: self._on_local(stream, r, w), *stream.wants)

    def _on_local(self, stream: Stream, readable: bool, writable: bool) -> None:
        if writable:
            stream.flush()
        if readable:
            stream.readable()
        self._watch(stream)
        if stream.local_ended:
            for session in list(self._sessions.values()):
                if session.template is not None and session.template.exits:
                    self._report_exits(session, session.template)

    def _close(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)
        if not stream.closed:
            self._loop.unwatch(stream.local.fileno())
            stream.close()

    def _forget(self, number: int, for_good: bool = False) -> None:
        """End what is left of a session here; it may go on elsewhere, and need what lies in a shared directory."""
        session = self._sessions.pop(number, None)
        if session is None:
            return
        template, session.template = session.template, None
        if template is not None:
            self._loop.unwatch(template.control.fileno())
            for stream in template.living.values():
                self._close(stream)
            os.close(template.lifeline)
            template.control.close()
        session.store = None
        own = session.directory / f"peers-{os.getpid()}"
        shutil.rmtree(session.directory if for_good else own, ignore_errors=True)


def run(options: WorkerOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        CommError: as ``Agent.step``.
    """
    if "torch" in sys.modules:
        raise CommError("The process of an agent imports torch itself, before it has threads.")
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.append(signum))
    os.environ.update(_environment(options))
    zygote = Zygote(load_factory(_EXECUTOR), options.memory)
    with tempfile.TemporaryDirectory(prefix="dtorch-") as own:
        agent = Agent(options, zygote, options.scratch or Path(own), say)
        try:
            while not stop:
                agent.step()
        finally:
            agent.close()


def _environment(options: WorkerOptions) -> dict[str, str]:
    """What must be set before anything is imported that reads it."""
    return {
        "DTORCH_FILE_ROOTS": os.pathsep.join(map(str, options.file_roots)),
        "OPENBLAS_NUM_THREADS": "1",  # a process with threads must not fork
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
    }
