"""The worker's loop: batches in, acknowledgements and replies out."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from dtorch.comm.channel import Buffer, Channel, ChannelClosedError
from dtorch.protocol.codec import clip, decode_as, encode
from dtorch.protocol.messages import PROTOCOL_VERSION, Ack, Batch, Fault, Reply, WorkerHello

Send = Callable[[Sequence[Buffer]], None]


class Executor(Protocol):
    """What runs batches."""

    def run(self, frames: list[memoryview]) -> None:
        """Run the payload of one batch. An exception is a bug of the engine and ends the worker."""


class ExecutorFactory(Protocol):
    """Makes a worker's executor."""

    def __call__(self, devices: list[int], send: Send, peers_dir: str, index: int, physical: str) -> Executor:
        """Make it.

        Args:
            devices: the numbers of the devices that the worker hosts.
            send: sends the client a reply, also during ``run``; the buffers may be changed afterwards.
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
    header = encode(Reply(index))

    def send(frames: Sequence[Buffer]) -> None:
        channel.send([header, *frames])

    try:
        executor = factory(list(devices), send, peers_dir, index, physical)
        channel.send([encode(WorkerHello(PROTOCOL_VERSION, os.getpid(), socket.gethostname()))])
        while True:
            frames = channel.receive()
            assert frames is not None, "there is no timeout"
            batch = decode_as(Batch, frames[0])
            executor.run([memoryview(frame) for frame in frames[1:]])
            channel.send([encode(Ack(batch.seq))])
    except ChannelClosedError:
        return 0
    except Exception:
        channel.send([encode(Fault(index, clip(traceback.format_exc())))])
        return 1


def _size_thread_pool(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:  # an executor without torch has no pool
        torch.set_num_threads(threads)
