"""``dtorch controller``: where clients and machines of a pool meet. One port, one process for each session.

The gate lets in who has a key, clients also only with a token, starts a controller for each session, finds places for
its workers, and carries bytes. To a session's controller it looks like a client and a template.
"""

from __future__ import annotations

import itertools
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dtorch.cluster import hosted, tokens
from dtorch.cluster.endpoint import BEAT_S, SILENCE_S, Listener, Loop, Peer
from dtorch.cluster.hosted import Hosted, Worker
from dtorch.cluster.options import ControllerOptions
from dtorch.cluster.places import Machine, choose, count
from dtorch.cluster.stream import Stream
from dtorch.core.errors import DtorchError, ProtocolError
from dtorch.protocol.codec import decode
from dtorch.protocol.messages import Exited, Fork, Forked, Kill, Stop, Stopped
from dtorch.protocol.pool import (
    POOL_VERSION,
    Again,
    Beat,
    Consumed,
    Data,
    Ended,
    ForTemplate,
    Host,
    Join,
    Joined,
    Leave,
    Look,
    Meet,
    Meeting,
    Open,
    Opened,
    Pool,
    PoolMessage,
    Refused,
    Unknown,
    pack,
    unpack,
)

_MAX_REQUEST_BYTES = 1 << 18
_AFTER_CLOSE_S = 6.0
"""A client whose connection was closed is not cut off: its machine has said so. It is cleaned up after soon."""
_CHECK_S = 1.0
"""How often revoked tokens are looked for."""


@dataclass
class _Agent:
    """A machine of the pool."""

    number: int
    peer: Peer
    machine: Machine
    pid: int
    heard_s: float


class Gate:
    """Serves clients and machines.

    Args:
        options: how.
        say: told what happens, in a line.

    Attributes:
        address: where it listens.

    Raises:
        CommError, KeyFileError: as ``Listener``.
    """

    def __init__(self, options: ControllerOptions, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self._name = secrets.token_hex(4)
        self._loop = Loop()
        self._listener = Listener(options.listen, options.keys)
        self.address = self._listener.address
        self._listener.watch(self._loop, self._on_network)
        self._agents: dict[int, _Agent] = {}
        self._machines: dict[bytes, _Agent] = {}  # by the connection's address
        self._sessions: dict[int, Hosted] = {}
        self._clients: dict[bytes, Hosted] = {}
        self._heard: dict[bytes, float] = {}
        self._streams: dict[int, tuple[Stream, Hosted, int]] = {}  # with the worker's number, -1: the client's
        self._numbers = itertools.count(1)
        self._beat_s = self._check_s = 0.0

    def step(self) -> None:
        """Wait for something, and handle it."""
        self._loop.step(BEAT_S / 2)
        self._on_network()
        now_s = time.monotonic()
        if now_s - self._beat_s < BEAT_S:
            return
        self._beat_s = now_s
        for agent in list(self._agents.values()):
            if now_s - agent.heard_s > SILENCE_S:
                self._agent_lost(agent, f"it has not been heard of for {SILENCE_S:g} s")
        for session in list(self._sessions.values()):
            if session.client is not None and now_s - self._heard.get(session.client.address, now_s) > SILENCE_S:
                self._client_lost(session, self._options.patience - SILENCE_S)
            if session.client is None and now_s > session.waits_until_s:
                self._end(session, "its client is gone")
        if now_s - self._check_s >= _CHECK_S:
            self._check_s = now_s
            self._check_tokens()

    def close(self) -> None:
        """End all sessions and the connections."""
        for session in list(self._sessions.values()):
            self._end(session, "the pool was shut down")
        self._listener.close()

    # The network

    def _on_network(self) -> None:
        for peer, frame in self._listener.receive():
            self._heard[peer.address] = time.monotonic()
            try:
                self._handle(peer, unpack(frame))
            except (ProtocolError, KeyError) as error:
                self._refuse(peer, f"a message has no place here: {error}")
        for peer in self._listener.lost():
            self._heard.pop(peer.address, None)
            if (agent := self._machines.get(peer.address)) is not None:
                self._agent_lost(agent, "its connection was closed")
            elif (session := self._clients.get(peer.address)) is not None:
                self._client_lost(session, _AFTER_CLOSE_S)

    def _handle(self, peer: Peer, message: PoolMessage | Data | ForTemplate) -> None:
        agent, session = self._machines.get(peer.address), self._clients.get(peer.address)
        if agent is not None:
            agent.heard_s = time.monotonic()
            self._from_agent(agent, message)
        elif session is not None:
            self._from_client(session, message)
        elif isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, Open):
            self._open(peer, message)
        elif isinstance(message, Look):
            self._look(peer, message)
        elif isinstance(message, Again):
            self._again(peer, message)
        elif isinstance(message, Beat | Data | Consumed | Ended | ForTemplate):
            self._send(peer, Unknown())
        else:
            raise ProtocolError(f"nobody sends {type(message).__name__} first")

    def _send(self, peer: Peer, message: PoolMessage | ForTemplate) -> None:
        self._listener.send(peer, pack(message))

    def _refuse(self, peer: Peer, why: str) -> None:
        """Send somebody away, and end what it has here."""
        self._send(peer, Refused(why))
        if (agent := self._machines.get(peer.address)) is not None:
            self._agent_lost(agent, why)
        elif (session := self._clients.get(peer.address)) is not None:
            self._end(session, why)

    def _stream(self, message: Data | Consumed | Ended, session: Hosted | None, agent: int | None) -> None:
        """Something about a stream, from the client of a session or from an agent; of others' streams they know nothing."""
        stream, owner, index = self._streams.get(message.stream, (None, None, -1))
        if stream is None or owner is None:
            return  # it has ended meanwhile
        own = (
            owner is session and index < 0
            if agent is None
            else index >= 0 and owner.workers[index].place.agent == agent
        )
        if not own:
            raise ProtocolError(f"stream {message.stream} is another's")
        if isinstance(message, Data):
            stream.data(message.position, message.data)
        elif isinstance(message, Consumed):
            stream.consumed(message.position)
        else:
            stream.ended(message.text)
        self._watch(stream)
        self._report_exits(owner)

    # Clients

    def _from_client(self, session: Hosted, message: PoolMessage | Data | ForTemplate) -> None:
        if isinstance(message, Data | Consumed | Ended):
            self._stream(message, session, None)
        elif not isinstance(message, Beat):
            raise ProtocolError(f"a client does not send {type(message).__name__} now")
        elif message.answer and session.client is not None:
            self._send(session.client, Beat(0))

    def _checked(self, peer: Peer, version: int, token: str) -> tokens.Token | None:
        """The token of a client that may come in; tells others why not."""
        try:
            if not self._listener.has_role(peer, "client"):
                raise ProtocolError("this key is not a client's")
            if version != POOL_VERSION:
                raise ProtocolError(f"it speaks version {version}, this pool {POOL_VERSION}; install the same dtorch")
            return tokens.check(self._options.keys, token)
        except DtorchError as error:
            self._send(peer, Refused(str(error)))
            return None

    def _open(self, peer: Peer, message: Open) -> None:
        token = self._checked(peer, message.version, message.token)
        if token is None:
            return
        workers = count((a.machine for a in self._agents.values()), message.device_type)
        if not workers:
            self._send(peer, Refused(f"the pool has no worker with a device of type {message.device_type!r} now"))
            return
        if len(self._sessions) >= self._options.sessions:
            self._send(peer, Refused(f"the pool has {len(self._sessions)} sessions, the most that it takes"))
            return
        number, stream = next(self._numbers), next(self._numbers)
        try:
            session = hosted.start(
                number, message, token.id, peer, self._options, stream, partial(self._to_client, number)
            )
        except OSError as error:
            self._send(peer, Refused(f"no controller can be started: {error}"))
            return
        session.most_workers = workers
        self._sessions[number] = self._clients[peer.address] = session
        self._streams[stream] = session.stream, session, -1
        self._watch(session.stream)
        self._loop.watch(session.control.fileno(), lambda *_: self._on_control(session))
        self._loop.watch(session.census, lambda *_: self._on_census(session))
        self._send(peer, Opened(number, stream, workers, session.secret))
        self._say(f"session {number}: {token.name or token.id} from {message.name}")

    def _to_client(self, number: int, frame: bytes) -> None:
        session = self._sessions.get(number)
        if session is not None and session.client is not None:
            self._listener.send(session.client, frame)

    def _again(self, peer: Peer, message: Again) -> None:
        """A client is back after its connection was broken."""
        session = self._sessions.get(message.session)
        if session is None or not secrets.compare_digest(session.secret, message.secret):
            self._send(peer, Refused("the session has ended meanwhile"))
            return
        if session.client is not None:
            del self._clients[session.client.address]
        session.client = peer
        self._clients[peer.address] = session
        self._send(peer, Again(session.number, "", session.stream.received))
        session.stream.resume(message.received)
        self._watch(session.stream)

    def _client_lost(self, session: Hosted, wait_s: float) -> None:
        """A client cannot be reached; it may come back within this time."""
        if session.client is not None:
            del self._clients[session.client.address]
            session.client, session.waits_until_s = None, time.monotonic() + wait_s

    def _check_tokens(self) -> None:
        gone = tokens.revoked(self._options.keys)
        for session in [s for s in self._sessions.values() if s.token in gone]:
            self._end(session, f"the token {session.token} was revoked")

    def _look(self, peer: Peer, message: Look) -> None:
        if self._checked(peer, message.version, message.token) is None:
            return
        places = [w.place for s in self._sessions.values() for w in s.workers.values()]
        slots = [
            f"{a.machine.host} {kind}: {sum((p.agent, p.slot) == (a.number, slot) for p in places)} workers"
            for a in self._agents.values()
            for slot, kind in enumerate(a.machine.slots)
        ]
        sessions = [f"{s.number}: {len(s.workers)} workers, {s.opened.name}" for s in self._sessions.values()]
        self._send(peer, Pool(tuple(slots[:4096]), tuple(sessions)))

    # Machines

    def _join(self, peer: Peer, message: Join) -> None:
        if not self._listener.has_role(peer, "worker"):
            self._send(peer, Refused("this key is not a worker's"))
        elif message.version != POOL_VERSION:
            self._send(peer, Refused(f"it speaks version {message.version}, this pool {POOL_VERSION}"))
        else:
            machine = Machine(message.host, message.address, message.slots)
            agent = _Agent(next(self._numbers), peer, machine, message.pid, time.monotonic())
            self._agents[agent.number] = self._machines[peer.address] = agent
            self._send(peer, Joined(self._name))
            self._say(f"{message.host} (pid {message.pid}) joined with {', '.join(message.slots)}")

    def _from_agent(self, agent: _Agent, message: PoolMessage | Data | ForTemplate) -> None:
        if isinstance(message, Data | Consumed | Ended):
            self._stream(message, None, agent.number)
        elif isinstance(message, ForTemplate):
            session = self._sessions.get(message.session)
            if session is not None and agent.number in session.agents:
                self._from_template(session, agent, message)
        elif isinstance(message, Meeting):
            session = self._sessions.get(message.session)
            if session is not None and session.meeting == (agent.number, ""):
                session.meeting = agent.number, message.address
                self._fork(session)
        elif isinstance(message, Leave):
            session = self._sessions.get(message.session)
            if session is not None and session.stopping:
                self._left(session, agent.number)
        elif isinstance(message, Join):
            self._agent_lost(agent, "it joins again")
            self._join(agent.peer, message)
        elif not isinstance(message, Beat):
            raise ProtocolError(f"a worker does not send {type(message).__name__}")
        elif message.answer:
            self._send(agent.peer, Beat(0))

    def _from_template(self, session: Hosted, agent: _Agent, message: ForTemplate) -> None:
        report = message.message
        if not isinstance(report, Forked | Exited | Stopped):
            raise ProtocolError(f"a template does not send {type(report).__name__}")
        worker = session.workers.get(report.index)
        if worker is None or worker.place.agent != agent.number:
            return
        if isinstance(report, Exited):
            worker.exited = report
            self._report_exits(session)
        else:
            session.tell(report)

    def _report_exits(self, session: Hosted) -> None:
        """Report the ends of workers all whose last words the controller has."""
        for index, worker in list(session.workers.items()):
            if worker.exited is not None and worker.stream.is_flushed:
                del session.workers[index]
                self._close(worker.stream)
                session.tell(worker.exited)

    def _agent_lost(self, agent: _Agent, why: str) -> None:
        self._agents.pop(agent.number, None)
        self._machines.pop(agent.peer.address, None)
        self._say(f"{agent.machine.host} (pid {agent.pid}) is lost: {why}")
        for session in list(self._sessions.values()):
            if agent.number not in session.agents:
                continue
            if session.meeting is not None and session.meeting[0] == agent.number:
                session.meeting = None
            for index, worker in session.workers.items():
                if worker.place.agent == agent.number:
                    worker.exited = Exited(index, f"its machine {agent.machine.host} (pid {agent.pid}) was lost: {why}")
            self._report_exits(session)
            self._left(session, agent.number)
            self._fork(session)

    def _left(self, session: Hosted, agent: int) -> None:
        session.agents.discard(agent)
        if session.stopping and not session.agents:
            session.control.shutdown(socket.SHUT_RDWR)  # all workers have ended

    # Sessions' controllers

    def _on_control(self, session: Hosted) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(session.control, _MAX_REQUEST_BYTES, 1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._loop.unwatch(session.control.fileno())
            return
        request = decode(data)
        if isinstance(request, Fork):
            session.forks.append((request, socket.socket(fileno=descriptors[0])))
            self._fork(session)
        elif isinstance(request, Kill):
            worker = session.workers.get(request.index)
            if worker is not None:
                self._to_template(session, worker.place.agent, request)
            waiting = [pair for pair in session.forks if pair[0].index == request.index]
            for pair in waiting:
                session.forks.remove(pair)
                pair[1].close()
                session.tell(Exited(request.index, "it was not started"))
        elif isinstance(request, Stop):
            session.stopping = True
            for number in list(session.agents):
                self._to_template(session, number, request)
            if not session.agents:
                session.control.shutdown(socket.SHUT_RDWR)

    def _to_template(self, session: Hosted, agent: int, message: Kill | Stop) -> None:
        found = self._agents.get(agent)
        if found is not None:
            self._send(found.peer, ForTemplate(session.number, message))

    def _fork(self, session: Hosted) -> None:
        """Let machines fork what waits for it; the first one to do so is where the session's workers meet."""
        machines = {a.number: a.machine for a in self._agents.values()}
        while session.forks:
            fork, _ = session.forks[0]
            if len(session.workers) >= session.most_workers:
                session.forks.popleft()[1].close()
                session.tell(Exited(fork.index, f"a session of this pool has at most {session.most_workers} workers"))
                continue
            own = [w.place for w in session.workers.values()]
            used = [w.place for s in self._sessions.values() for w in s.workers.values()]
            meeting = None if session.meeting is None else session.meeting[0]
            place = choose(
                machines, session.opened.device_type, used, own, session.last_places.get(fork.index), meeting
            )
            if isinstance(place, str):
                session.forks.popleft()[1].close()
                session.tell(Exited(fork.index, place))
                continue
            if session.meeting is None:
                session.meeting = place.agent, ""
                session.agents.add(place.agent)
                self._send(self._agents[place.agent].peer, Meet(session.number))
            if not session.meeting[1]:
                return  # until it has answered
            fork, connection = session.forks.popleft()
            agent = self._agents[place.agent]
            number = next(self._numbers)
            stream = Stream(number, connection, partial(self._listener.send, agent.peer))
            session.workers[fork.index] = Worker(place, stream)
            session.last_places[fork.index] = place
            session.agents.add(place.agent)
            self._streams[number] = stream, session, fork.index
            self._send(agent.peer, Host(
                session.number, number, fork.index, fork.devices, fork.threads, fork.generation, place.slot,
                session.meeting[1],
            ))  # fmt: skip
            self._watch(stream)

    def _on_census(self, session: Hosted) -> None:
        """The controller has ended; what it said last is passed on."""
        session.stream.readable()
        self._end(session, "" if session.stopping else None)

    def _end(self, session: Hosted, why: str | None) -> None:
        """End a session. ``why``: empty when its client wanted that; ``None`` when its controller ended by itself."""
        if self._sessions.pop(session.number, None) is None:
            return
        self._loop.unwatch(session.control.fileno())
        self._loop.unwatch(session.census)
        ended = session.end()
        why = f"its controller ended with {ended}" if why is None else why
        for number in session.agents | {w.place.agent for w in session.workers.values()} | {
            p.agent for p in session.last_places.values()
        }:  # fmt: skip
            if number in self._agents:
                self._send(self._agents[number].peer, Leave(session.number))
        for worker in session.workers.values():
            self._close(worker.stream)
        self._close(session.stream)
        if session.client is not None:
            self._send(session.client, Refused(why) if why else Ended(session.stream.number, 0, ""))
            self._clients.pop(session.client.address, None)
        self._say(f"session {session.number} has ended{': ' if why else ''}{why}")

    # Streams

    def _watch(self, stream: Stream) -> None:
        if not stream.closed:
            self._loop.watch(stream.local.fileno(), lambda r, w: self._on_local(stream, r, w), *stream.wants)

    def _on_local(self, stream: Stream, readable: bool, writable: bool) -> None:
        if readable:
            stream.readable()
        if writable:
            stream.flush()
            self._report_exits(self._streams[stream.number][1])
        self._watch(stream)

    def _close(self, stream: Stream) -> None:
        self._streams.pop(stream.number, None)
        if not stream.closed:
            self._loop.unwatch(stream.local.fileno())
            stream.close()


def run(options: ControllerOptions, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        CommError, KeyFileError: as ``Gate``.
    """
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: stop.append(signum))
    gate = Gate(options, say)
    say(f"listening at {gate.address}")
    try:
        while not stop:
            gate.step()
    finally:
        gate.close()
