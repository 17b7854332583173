"""Every control message, one frozen dataclass each.

A message travels as a header frame (``dtorch.protocol.codec``) and, where the docstring says so, payload frames that
only client and executor look into. Fields are integers from 0 to 2**63 - 1, text, tuples of integers, tables of text,
and rows of ``WorkerInfo``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

PROTOCOL_VERSION = 2
"""Both ends of a connection name theirs first, and part if it differs."""

# Client and controller


@dataclass(frozen=True, slots=True)
class Hello:
    """Client to controller, first of all. Reply: ``Welcome``, or ``Fault`` and the end."""

    KIND: ClassVar[int] = 1
    version: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Controller to client, in answer to ``Hello``, before anything else."""

    KIND: ClassVar[int] = 2
    version: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class AddWorker:
    """Client to controller: start a worker; it gets the next number, from 0. Reply: ``WorkerUp`` or ``WorkerLost``."""

    KIND: ClassVar[int] = 3
    devices: tuple[int, ...]
    threads: int
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Batch:
    """Client to controller, which passes it on unchanged to the workers: run the payload. Reply: ``Ack``.

    It goes to the workers in ``targets``, or, with ``None``, to all that were asked for before it. Workers in
    ``targets`` that have been lost are left out. ``seq`` rises from batch to batch. ``shared`` is 1 when the payload
    refers to the client's shared memory or opens a file: their content may change once the batch is acknowledged.
    """

    KIND: ClassVar[int] = 4
    seq: int
    targets: tuple[int, ...] | None
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """Worker to controller: it has run this batch. Controller to client: all live workers have run all up to it."""

    KIND: ClassVar[int] = 5
    seq: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Worker to controller, which passes it on unchanged to the client: the payload is what the executor sent.

    What a worker sent before its end may arrive before its ``WorkerLost``, never after.
    """

    KIND: ClassVar[int] = 6
    index: int


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """Controller to client: a worker is ready."""

    KIND: ClassVar[int] = 7
    index: int
    pid: int
    host: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Controller to client: a worker has ended, or could not start (``pid`` 0 if it never was a process).

    It is not replaced, and what it held is gone.
    """

    KIND: ClassVar[int] = 8
    index: int
    pid: int
    devices: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Fault:
    """Worker to controller to client: a bug of the engine; the worker ends. From the controller itself: ``None``."""

    KIND: ClassVar[int] = 9
    index: int | None
    text: str


@dataclass(frozen=True, slots=True)
class ListWorkers:
    """Client to controller. Reply: ``WorkerList``."""

    KIND: ClassVar[int] = 10


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One row of a ``WorkerList``. ``state`` is ``starting``, ``up``, ``restarting`` (it ends, or starts again),
    ``replaying`` (it is being brought to where it was) or ``lost``."""

    index: int
    pid: int
    host: str
    devices: tuple[int, ...]
    state: str


@dataclass(frozen=True, slots=True)
class WorkerList:
    """Controller to client: all workers ever asked for, by number."""

    KIND: ClassVar[int] = 11
    workers: tuple[WorkerInfo, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Client to controller. Reply: ``Pong``."""

    KIND: ClassVar[int] = 12
    token: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Controller to client: the token of a ``Ping``."""

    KIND: ClassVar[int] = 13
    token: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Client to controller: end all workers, then yourself. No reply but the end of the connection.

    Work that has not run is dropped. Workers get ``grace_ms`` to leave what they are in, then they are killed.
    """

    KIND: ClassVar[int] = 14
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Restarting:
    """Controller to client: a worker has ended, and all start again and repeat what was done. ``WorkerUp`` follows."""

    KIND: ClassVar[int] = 15
    index: int
    pid: int
    devices: tuple[int, ...]
    reason: str


# Worker and controller


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Worker to controller, first of all, when its executor is ready."""

    KIND: ClassVar[int] = 20
    version: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class Broken:
    """Worker to controller: an operation with other workers failed, so it does not know its state; the worker ends."""

    KIND: ClassVar[int] = 21
    text: str


@dataclass(frozen=True, slots=True)
class Replay:
    """Controller to worker, first of all: start from a snapshot, if one is named, and be silent about what follows.

    Until ``Resume`` batches are not acknowledged, and the only replies are reports of failures and of saves.
    """

    KIND: ClassVar[int] = 22
    snapshot: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Controller to worker: the replay is over. Reply: ``Resumed``.

    Of the next batch the client has got this many replies, failures and saves not counted; they are not sent again.
    """

    KIND: ClassVar[int] = 23
    replies: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """Worker to controller: it is where the worker was that it replaces."""

    KIND: ClassVar[int] = 24


@dataclass(frozen=True, slots=True)
class Save:
    """Controller to worker: write everything you hold to this file. Reply: ``Saved``."""

    KIND: ClassVar[int] = 25
    path: str


@dataclass(frozen=True, slots=True)
class Saved:
    """Worker to controller: a snapshot is written, which took this long; or why it is not."""

    KIND: ClassVar[int] = 26
    milliseconds: int
    fault: str


# Controller and template (the process that forks workers)


@dataclass(frozen=True, slots=True)
class Fork:
    """Controller to template, with the worker's end of its channel: fork a worker. Reply: ``Forked`` or ``Exited``.

    Workers of one generation meet each other.
    """

    KIND: ClassVar[int] = 30
    index: int
    devices: tuple[int, ...]
    threads: int
    env: dict[str, str]
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Controller to template: kill a worker unless it has ended. Reply: ``Exited``, now or before."""

    KIND: ClassVar[int] = 31
    index: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Controller to template: end the workers as in ``Shutdown``, then yourself. No reply but the end."""

    KIND: ClassVar[int] = 32
    grace_ms: int


@dataclass(frozen=True, slots=True)
class TemplateReady:
    """Template to controller: its modules are imported."""

    KIND: ClassVar[int] = 33


@dataclass(frozen=True, slots=True)
class TemplateFailed:
    """Template to controller: its modules cannot be imported; it ends."""

    KIND: ClassVar[int] = 34
    text: str


@dataclass(frozen=True, slots=True)
class Forked:
    """Template to controller: the worker is a process now."""

    KIND: ClassVar[int] = 35
    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Template to controller: the worker has ended, or could not be forked."""

    KIND: ClassVar[int] = 36
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Template to controller: a signal has stopped the worker; or, with 0, it goes on."""

    KIND: ClassVar[int] = 37
    index: int
    stopped: int


Message = (
    Hello
    | Welcome
    | AddWorker
    | Batch
    | Ack
    | Reply
    | WorkerUp
    | WorkerLost
    | Fault
    | ListWorkers
    | WorkerList
    | Ping
    | Pong
    | Shutdown
    | WorkerHello
    | Fork
    | Kill
    | Stop
    | TemplateReady
    | TemplateFailed
    | Forked
    | Exited
    | Stopped
    | Restarting
    | Broken
    | Replay
    | Resume
    | Resumed
    | Save
    | Saved
)
