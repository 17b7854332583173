"""One session as the gate sees it: a controller process of its own, its client, its workers on machines of the pool."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dtorch.cluster.endpoint import Peer
from dtorch.cluster.options import ControllerOptions
from dtorch.cluster.places import Place
from dtorch.cluster.stream import Stream
from dtorch.comm.lifetime import describe_exit
from dtorch.protocol.codec import encode
from dtorch.protocol.messages import Exited, Fork, Message
from dtorch.protocol.pool import Open


@dataclass
class Worker:
    """A worker of the session that has not been reported as ended."""

    place: Place
    stream: Stream
    exited: Exited | None = None  # to be reported when its last words are


@dataclass
class Hosted:
    """A session.

    Attributes:
        client: its connection; ``None`` while that is broken.
        most_workers: how many places the pool had when it began.
        waits_until_s: for so long it may come back.
        control: plays the template to the controller.
        census: readable when the controller has ended.
        forks: what waits for the workers' meeting place.
        meeting: where workers meet: a machine and, when it is known, the address there.
        closing: it is over; why, if not because the client said so.
    """

    number: int
    opened: Open
    token: str
    client: Peer | None
    secret: str
    process: subprocess.Popen[bytes]
    stream: Stream
    control: socket.socket
    census: int
    directory: str
    most_workers: int = 0
    waits_until_s: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    last_places: dict[int, Place] = field(default_factory=dict)
    forks: deque[tuple[Fork, socket.socket]] = field(default_factory=deque)
    meeting: tuple[int, str] | None = None
    agents: set[int] = field(default_factory=set)
    stopping: bool = False
    closing: str | None = None

    def tell(self, message: Message) -> None:
        """Tell the controller what a template would."""
        try:
            self.control.send(encode(message), socket.MSG_NOSIGNAL)
        except OSError:
            return  # it has ended

    def end(self) -> str:
        """Let go of everything; the controller ends if it has not. Returns how it ended."""
        self.process.kill()
        ended = describe_exit(self.process.wait())
        for _, connection in self.forks:
            connection.close()
        self.control.close()
        os.close(self.census)
        shutil.rmtree(self.directory, ignore_errors=True)
        return ended


def start(
    number: int,
    opened: Open,
    token: str,
    client: Peer,
    options: ControllerOptions,
    stream: int,
    send: Callable[[bytes], None],
) -> Hosted:
    """Start a session's controller.

    Raises:
        OSError: no process can be started.
    """
    directory = tempfile.mkdtemp(prefix="dtorch-")
    for name in ("peers", "snapshots"):
        os.mkdir(f"{directory}/{name}")
    census, theirs_census = os.pipe()
    ours, theirs = socket.socketpair()
    control, theirs_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings = {
        "client_fd": theirs.fileno(),
        "census_fd": theirs_census,
        "pool_fd": theirs_control.fileno(),
        "session_dir": directory,
        "executor": "",
        "physical": opened.device_type,
        "restarts": min(opened.restarts, 100),
        "log_operators": opened.log_operators,
        "log_bytes": min(opened.log_bytes, options.memory // 2),
        "message_bytes": options.message,
        "memory": options.memory,
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "dtorch.controller", json.dumps(settings)],
            pass_fds=(theirs.fileno(), theirs_census, theirs_control.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
    except BaseException:
        for end in (ours, control):
            end.close()
        os.close(census)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        theirs.close()
        theirs_control.close()
        os.close(theirs_census)
    return Hosted(
        number,
        opened,
        token,
        client,
        secrets.token_hex(16),
        process,
        Stream(stream, ours, send),
        control,
        census,
        directory,
    )
