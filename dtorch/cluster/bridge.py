"""``python -m dtorch.cluster.bridge``: the client's process that speaks with a pool; to its client it is the controller.

It is told what to do on its standard input (``Settings`` in JSON), and says on a pipe what has become of it, one line of
JSON each: ``{"workers": n}`` when the session has begun, ``{"error": text}`` before it ends with an error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from dtorch.cluster.endpoint import BEAT_S, SILENCE_S, Connection, Loop
from dtorch.cluster.options import ConnectOptions
from dtorch.cluster.stream import Stream
from dtorch.core.errors import CommError, DtorchError, ProtocolError
from dtorch.protocol.pool import (
    POOL_VERSION,
    Again,
    Beat,
    Consumed,
    Data,
    Ended,
    Look,
    Open,
    Opened,
    Pool,
    PoolMessage,
    Refused,
    Unknown,
    pack,
    unpack,
)

_OPEN_S = 20.0
"""So long the pool has to answer the first message."""
_CUT_OFF_S = 30.0
"""So long a network may fail."""


class Settings(BaseModel):
    """What a bridge is told: the client's end, the pipe to say what becomes of it, and how to connect."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    client_fd: int
    census_fd: int
    report_fd: int
    connect: ConnectOptions


@dataclass
class _Session:
    number: int
    secret: str
    stream: Stream


class Bridge:
    """One client's connection to a pool.

    Args:
        settings: how.
    """

    def __init__(self, settings: Settings) -> None:
        self._options, self._report_fd = settings.connect, settings.report_fd
        self._client = socket.socket(fileno=settings.client_fd)
        self._loop = Loop()
        self._session: _Session | None = None
        self._over = False
        self._asked_again_s = 0.0
        self._closed_s: float | None = None  # since when the connection is closed
        self._breaks = 0
        self._begun_s = self._heard_s = time.monotonic()
        self._told_s = 0.0
        self._connection = Connection(self._options.address, self._options.keys, "client")
        self._connection.watch(self._loop, self._on_gate)

    def run(self) -> None:
        """Carry the client's bytes until the session is over.

        Raises:
            CommError: the pool lets it not in, or is gone.
        """
        options = self._options
        self._tell(Open(
            POOL_VERSION, options.token, options.name[:200], options.device_type, options.restarts, options.log_operators,
            options.log_bytes,
        ))  # fmt: skip
        while not self._over:
            self._loop.step(BEAT_S / 2)
            self._check(time.monotonic())

    def close(self) -> None:
        """Close the connection; what was sent goes out first."""
        self._connection.close()

    def _tell(self, message: PoolMessage) -> None:
        self._connection.send(pack(message))

    def _check(self, now_s: float) -> None:
        """Look whether the pool is there."""
        connection, where = self._connection, f"The pool's controller at {self._options.address}"
        if connection.refused:
            raise CommError(f"{where} does not know the key in {self._options.keys}.")
        if connection.breaks != self._breaks:
            self._breaks, self._closed_s = connection.breaks, now_s
        if connection.open:
            self._closed_s = None
        if self._session is None and now_s - self._begun_s > _OPEN_S:
            raise CommError(
                f"{where} did not answer within {_OPEN_S:g} s; is that the address, and its key in server.pub?"
            )
        if self._closed_s is not None and now_s - self._closed_s > SILENCE_S and self._session is not None:
            raise CommError(f"{where} has closed the connection, and does not take another: it has ended")
        if now_s - self._heard_s > _CUT_OFF_S:
            raise CommError(f"{where} has not been heard of for {_CUT_OFF_S:g} s.")
        if now_s - self._told_s >= BEAT_S and connection.open:
            self._told_s = now_s
            self._tell(Beat(1))

    def _on_gate(self) -> None:
        for frame in self._connection.receive():
            self._heard_s = time.monotonic()
            self._handle(unpack(frame))

    def _handle(self, message: object) -> None:
        session = self._session
        if isinstance(message, Refused):
            raise CommError(f"The pool at {self._options.address} refused this client: {message.text}.")
        if isinstance(message, Beat | Pool):
            return
        if isinstance(message, Opened) and session is None:
            stream = Stream(message.stream, self._client, self._connection.send)
            self._session = _Session(message.session, message.secret, stream)
            self._report({"workers": message.workers})
            self._watch(stream)
        elif session is None:
            return  # beats before the answer to the first message
        elif isinstance(message, Data):
            session.stream.data(message.position, message.data)
        elif isinstance(message, Consumed):
            session.stream.consumed(message.position)
        elif isinstance(message, Again):
            session.stream.resume(message.received)
        elif isinstance(message, Unknown):
            self._ask_again(session)
        elif isinstance(message, Ended):
            session.stream.ended(message.text)
        else:
            raise ProtocolError(f"a gate does not send {type(message).__name__}")
        if self._session is not None:
            self._watch(self._session.stream)

    def _ask_again(self, session: _Session) -> None:
        """The gate does not know this connection: the one before it was lost."""
        now_s = time.monotonic()
        if now_s - self._asked_again_s > BEAT_S:
            self._asked_again_s = now_s
            self._tell(Again(session.number, session.secret, session.stream.received))

    def _watch(self, stream: Stream) -> None:
        if stream.local_ended or (stream.remote_end is not None and stream.is_flushed):
            self._over = True
        else:
            self._loop.watch(self._client.fileno(), lambda r, w: self._on_client(stream, r, w), *stream.wants)

    def _on_client(self, stream: Stream, readable: bool, writable: bool) -> None:
        if writable:
            stream.flush()
        if readable:
            stream.readable()
        self._watch(stream)

    def _report(self, facts: dict[str, object]) -> None:
        os.write(self._report_fd, json.dumps(facts).encode() + b"\n")


def look(options: ConnectOptions) -> Pool:
    """What is in a pool now.

    Raises:
        CommError: it does not let this client in, or does not answer.
    """
    loop = Loop()
    connection = Connection(options.address, options.keys, "client")
    found: list[object] = []
    connection.watch(loop, lambda: found.extend(map(unpack, connection.receive())))
    try:
        connection.send(pack(Look(POOL_VERSION, options.token)))
        end_s = time.monotonic() + _OPEN_S / 2
        while not found and not connection.refused and time.monotonic() < end_s:
            loop.step(0.1)
    finally:
        connection.close()
    answer = found[0] if found else None
    if isinstance(answer, Pool):
        return answer
    if connection.refused:
        raise CommError(f"The pool at {options.address} does not know the key in {options.keys}.")
    if isinstance(answer, Refused):
        raise CommError(f"The pool at {options.address} refused this client: {answer.text}.")
    raise CommError(f"No pool answers at {options.address}.")


def main() -> None:
    """Serve the client that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's, which ends this process
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    for descriptor in (settings.client_fd, settings.census_fd, settings.report_fd):
        os.set_inheritable(descriptor, False)
    code = 1
    try:
        bridge = Bridge(settings)
        try:
            bridge.run()
            code = 0
        finally:
            bridge.close()
    except DtorchError as error:
        os.write(settings.report_fd, json.dumps({"error": str(error)}).encode() + b"\n")
    os._exit(code)


if __name__ == "__main__":
    main()
