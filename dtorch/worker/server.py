"""The worker's loop: batches in, acknowledgements and replies out."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from dtorch.comm.channel import Buffer, Channel, ChannelClosedError
from dtorch.core.errors import CommError, ProtocolError
from dtorch.protocol.codec import clip, decode, encode
from dtorch.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Batch,
    Broken,
    Fault,
    Replay,
    Reply,
    Resume,
    Resumed,
    Save,
    Saved,
    WorkerHello,
)

Send = Callable[[Sequence[Buffer]], None]


class Executor(Protocol):
    """What runs batches."""

    def run(self, frames: list[memoryview]) -> None:
        """Run the payload of one batch. An exception is a bug of the engine and ends the worker.

        Raises:
            CommError: another worker is gone or does not answer; this one's state is lost with it.
        """

    def mute(self, replies: int) -> None:
        """Send so few replies less from now on, reports of failures and of saves not counted."""

    def save(self, path: str) -> None:
        """Write the state to a file.

        Raises:
            OSError: it cannot be written.
        """

    def restore(self, path: str) -> None:
        """Take the state from a file of ``save``, before the first batch."""


class ExecutorFactory(Protocol):
    """Makes a worker's executor."""

    def __call__(self, devices: list[int], send: Send, peers_dir: str, index: int, physical: str) -> Executor:
        """Make it.

        Args:
            devices: the numbers of the devices that the worker hosts.
            send: sends the client a reply, from any thread, also during ``run``; the buffers may be changed afterwards.
            peers_dir: a directory in which the session's workers meet.
            index: the worker's number.
            physical: the torch device type on which it keeps tensors.
        """


def serve(
    channel: Channel,
    *,
    index: int,
    devices: Sequence[int],
    threads: int,
    factory: ExecutorFactory,
    peers_dir: str,
    physical: str,
) -> int:
    """Run batches until the controller is gone or the executor fails; returns the exit code of the process."""
    _size_thread_pool(threads)
    header, sending = encode(Reply(index)), threading.Lock()

    def post(frames: Sequence[Buffer]) -> None:
        with sending:
            channel.send(frames)

    def send(frames: Sequence[Buffer]) -> None:
        post([header, *frames])

    try:
        executor = factory(list(devices), send, peers_dir, index, physical)
        post([encode(WorkerHello(PROTOCOL_VERSION, os.getpid(), socket.gethostname()))])
        replaying = False
        while True:
            frames = channel.receive()
            assert frames is not None, "there is no timeout"
            message = decode(frames[0])
            if isinstance(message, Batch):
                executor.run([memoryview(frame) for frame in frames[1:]])
                if not replaying:
                    post([encode(Ack(message.seq))])
            elif isinstance(message, Replay):
                replaying = True
                executor.mute(sys.maxsize)
                if message.snapshot:
                    executor.restore(message.snapshot)
            elif isinstance(message, Resume):
                replaying = False
                executor.mute(message.replies)
                post([encode(Resumed())])
            elif isinstance(message, Save):
                post([encode(_save(executor, message.path))])
            else:
                raise ProtocolError(f"a controller does not send {type(message).__name__}")
    except ChannelClosedError:
        return 0
    except CommError as error:
        post([encode(Broken(clip(str(error))))])
        return 1  # which closes the connections to the others, so that none waits for this one
    except Exception:
        post([encode(Fault(index, clip(traceback.format_exc())))])
        return 1


def _save(executor: Executor, path: str) -> Saved:
    started = time.monotonic()
    fault = ""
    try:
        executor.save(path)
    except OSError as error:
        fault = clip(str(error))
    return Saved(int((time.monotonic() - started) * 1000), fault)


def _size_thread_pool(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:  # an executor without torch has no pool
        torch.set_num_threads(threads)
