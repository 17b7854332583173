"""Both ends of a pool's connections: ZeroMQ over TCP, always with CURVE; there is no other way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import zmq
from zmq.utils.monitor import recv_monitor_message
from zmq.utils.z85 import encode as z85

from dtorch.cluster import keys
from dtorch.core.errors import CommError
from dtorch.protocol.pool import MAX_FRAME

BEAT_S = 0.5
"""How often either side gives a sign of life."""
SILENCE_S = 4.0
"""Whoever has not been heard of for so long is taken for lost."""

_DOMAIN = b"dtorch"
Ready = Callable[[bool, bool], None]
"""Called with: readable or at its end; writable."""


class Loop:
    """Descriptors and ZeroMQ sockets, and what to do when they are ready."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._ready: dict[Any, Ready] = {}

    def watch(self, source: Any, ready: Ready, read: bool = True, write: bool = False) -> None:
        """Call ``ready`` when the source is; again with other wishes to change them, with none to call no more."""
        if not (read or write):
            self.unwatch(source)
            return
        self._ready[source] = ready
        self._poller.register(source, (zmq.POLLIN if read else 0) | (zmq.POLLOUT if write else 0))

    def unwatch(self, source: Any) -> None:
        """Call no more; before the source is closed. Idempotent."""
        if self._ready.pop(source, None) is not None:
            with suppress(KeyError):
                self._poller.unregister(source)

    def step(self, timeout_s: float) -> None:
        """Wait until something is ready, and call who watches it."""
        for source, events in self._poller.poll(int(timeout_s * 1000)):
            ready = self._ready.get(source)
            if ready is not None:
                ready(bool(events & ~zmq.POLLOUT), bool(events & zmq.POLLOUT))


class Peer:
    """Whoever a listener hears of: one connection, with the key that it was made with."""

    def __init__(self, address: bytes, key: bytes, descriptor: int) -> None:
        self.address, self.key, self.descriptor = address, key, descriptor


class Listener:
    """The gate's socket.

    Args:
        address: where to listen.
        directory: of the keys; read again at each connection, so that keys can be added and removed.

    Attributes:
        address: where it listens, with the port.

    Raises:
        CommError: that cannot be.
        KeyFileError: the server's key is not there.
    """

    def __init__(self, address: str, directory: Path) -> None:
        pair = keys.pair(directory, "server")
        keys.secret_text(directory / "token.key")  # rather now than when the first client comes
        self._directory = directory
        self._context: zmq.Context[Any] = zmq.Context()
        self._asked = self._context.socket(zmq.REP)
        self._asked.bind("inproc://zeromq.zap.01")
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.CURVE_SERVER, 1), (zmq.ROUTER_MANDATORY, 1), (zmq.SNDHWM, 0), (zmq.RCVHWM, 100), (zmq.LINGER, 500),
            (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.HANDSHAKE_IVL, 5000), (zmq.IPV6, int("[" in address)),
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._socket.curve_secretkey, self._socket.zap_domain = pair.secret, _DOMAIN
        self._monitor = self._socket.get_monitor_socket(zmq.Event.DISCONNECTED)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise CommError(f"nothing can listen at {address}: {error}") from error
        self.address = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode()
        self._peers: dict[bytes, Peer] = {}
        self._lost: list[Peer] = []

    def watch(self, loop: Loop, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever ``receive`` or ``lost`` may have something."""
        loop.watch(self._asked, lambda *_: self._answer())
        loop.watch(self._socket, lambda *_: ready())
        loop.watch(self._monitor, lambda *_: ready())

    def receive(self, most: int = 200) -> Iterator[tuple[Peer, bytes]]:
        """What has come, up to so many messages."""
        for _ in range(most):
            try:
                address, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) != 1:
                continue  # no program of ours sends that
            peer = self._peers.get(address.bytes)
            if peer is None:
                self._note_lost()  # first: the descriptor may have been another's
                frame = frames[0]
                descriptor, key = frame.get(zmq.SRCFD), cast(str, frame.get("User-Id")).encode()
                peer = self._peers[address.bytes] = Peer(address.bytes, key, descriptor)
            yield peer, frames[0].bytes

    def lost(self) -> list[Peer]:
        """Those whose connection has been closed since the last call."""
        self._note_lost()
        found, self._lost = self._lost, []
        return found

    def _note_lost(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            for peer in [p for p in self._peers.values() if p.descriptor == event["value"]]:
                self._lost.append(self._peers.pop(peer.address))

    def has_role(self, peer: Peer, role: str) -> bool:
        """Whether the peer's key is one for this role."""
        return peer.key in keys.allowed(self._directory, role)

    def send(self, peer: Peer, frame: bytes) -> None:
        """Send a frame; to who is gone it is lost, which ``lost`` tells."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart([peer.address, frame], zmq.NOBLOCK)

    def close(self) -> None:
        """Close it; what was sent goes out first."""
        self._socket.disable_monitor()
        for socket in (self._asked, self._monitor, self._socket):
            socket.close()
        self._context.term()

    def _answer(self) -> None:
        """Say whether a key may connect (ZeroMQ's authentication protocol, RFC 27)."""
        version, request, domain, _, _, mechanism, *credentials = self._asked.recv_multipart()
        key = z85(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        known = domain == _DOMAIN and any(key in keys.allowed(self._directory, role) for role in keys.ROLES)
        status = (b"200", b"OK", key) if known else (b"400", b"this key may not connect", b"")
        self._asked.send_multipart([version, request, *status, b""])


class Connection:
    """A client's or agent's connection to the gate; made again by itself when it breaks.

    Attributes:
        refused: the gate does not let this key in.
        open: there is a connection.
        breaks: how often it broke.
    """

    def __init__(self, address: str, directory: Path, role: str) -> None:
        pair, server = keys.pair(directory, role), keys.public(directory, "server")
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 500), (zmq.MAXMSGSIZE, MAX_FRAME), (zmq.IPV6, int("[" in address)),
            (zmq.HANDSHAKE_IVL, 5000), (zmq.RECONNECT_IVL, 100), (zmq.RECONNECT_IVL_MAX, 1000),
        ):  # fmt: skip
            self._socket.setsockopt(option, value)
        self._socket.curve_serverkey = server
        self._socket.curve_publickey, self._socket.curve_secretkey = pair.public, pair.secret
        self._monitor = self._socket.get_monitor_socket()
        self.refused, self.open, self.breaks = False, False, 0
        self._socket.connect(address)

    def watch(self, loop: Loop, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever ``receive`` may have something, or the attributes have changed."""
        loop.watch(self._socket, lambda *_: ready())
        loop.watch(self._monitor, lambda *_: self._look(ready))

    def receive(self, most: int = 200) -> Iterator[bytes]:
        """What has come, up to so many messages."""
        for _ in range(most):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 1:
                yield frames[0]

    def send(self, frame: bytes) -> None:
        """Send a frame; without a connection it goes out when there is one, or is lost."""
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close it; what was sent goes out first."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def _look(self, ready: Callable[[], None]) -> None:
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                ready()
                return
            if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
                self.refused = True
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.open = True
            elif event == zmq.Event.DISCONNECTED:
                self.open, self.breaks = False, self.breaks + 1
