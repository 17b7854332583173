"""Workers that do no work: for measuring, and testing, everything else.

``python -m dtorch.worker.null SETTINGS`` hosts any number of them in one process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

from dtorch.comm.channel import Channel, ChannelClosedError, pack
from dtorch.comm.lifetime import end_with_parent
from dtorch.protocol.codec import decode_as, encode
from dtorch.protocol.messages import PROTOCOL_VERSION, Ack, Batch, Reply, WorkerHello
from dtorch.worker.server import Send

ECHO = b"echo"
"""First payload frame of a batch that wants the frames after it sent back."""


class NullExecutor:
    """Does nothing but answer ``ECHO`` batches."""

    def __init__(
        self, devices: list[int], send: Send, peers_dir: str = "", index: int = 0, physical: str = "cpu"
    ) -> None:
        self._send = send

    def run(self, frames: list[memoryview]) -> None:
        """As ``server.Executor.run``."""
        if frames and frames[0] == ECHO:
            self._send(frames[1:])


class NullHost:
    """Many null workers on one thread.

    Args:
        channels: one a worker, by index.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._poller = select.epoll()
        self._workers: dict[int, tuple[Channel, NullExecutor]] = {}
        hello = pack([encode(WorkerHello(PROTOCOL_VERSION, os.getpid(), socket.gethostname()))])
        for index, channel in enumerate(channels):
            self._workers[channel.fileno()] = channel, NullExecutor([index], self._sender(index, channel))
            self._poller.register(channel, select.EPOLLIN)
            channel.post(hello)

    def run(self) -> None:
        """Serve until the controller is gone."""
        while True:
            for descriptor, _ in self._poller.poll():
                channel, executor = self._workers[descriptor]
                try:
                    channel.read()
                except ChannelClosedError:
                    return
                while (frames := channel.take()) is not None:
                    batch = decode_as(Batch, frames[0])
                    executor.run([memoryview(frame) for frame in frames[1:]])
                    channel.send([encode(Ack(batch.seq))])

    @staticmethod
    def _sender(index: int, channel: Channel) -> Send:
        header = encode(Reply(index))
        return lambda frames: channel.send([header, *frames])


def main() -> None:
    """Serve the connections that SETTINGS, in JSON, names."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(settings["lifeline_fd"])
    NullHost([Channel(socket.socket(fileno=descriptor)) for descriptor in settings["connections"]]).run()


if __name__ == "__main__":
    main()
