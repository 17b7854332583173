"""A worker's executor in a pool: what a client may not do there, and where its workers meet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtorch.cluster.options import MEETING
from dtorch.core.errors import DtorchError, ProtocolError
from dtorch.worker.executor import Executor, Send


class PoolExecutor(Executor):
    """As ``Executor``, for clients that are on other machines and are not trusted.

    Args:
        peers_dir: holds a file ``MEETING``: ``store`` (host and port of the store), ``address`` (on which this worker
            listens for others), ``snapshots`` (where its snapshots lie) and ``tensors`` (how many it may hold).
    """

    def __init__(self, devices: Sequence[int], send: Send, peers_dir: str, index: int, physical: str) -> None:
        meeting = json.loads(Path(peers_dir, MEETING).read_text(encoding="utf-8"))
        peers = f"tcp://{meeting['store']}/{meeting['generation']}"
        super().__init__(devices, send, peers, index, physical, hostname=meeting["address"])
        self._most_tensors = int(meeting["tensors"])
        self._snapshots = Path(meeting["snapshots"])

    def run(self, frames: Sequence[bytes | memoryview]) -> None:
        """As ``Executor.run``.

        Raises:
            DtorchError: there are more tensors than a session may have.
        """
        super().run(frames)
        if len(self.store) > self._most_tensors:
            raise DtorchError(
                f"The session holds {len(self.store)} tensors on worker {self.index}; this pool allows {self._most_tensors}."
            )

    def save(self, path: str) -> None:
        """As ``Executor.save``, to this machine's own directory; of earlier snapshots only the last is kept."""
        self._snapshots.mkdir(exist_ok=True)
        super().save(str(self._snapshots / Path(path).name))
        number = int(Path(path).name.split("-")[0])
        for old in self._snapshots.glob(f"*-{self.index}"):
            if int(old.name.split("-")[0]) < number - 1:
                old.unlink()

    def restore(self, path: str) -> None:
        """As ``Executor.restore``.

        Raises:
            OSError: it was taken on a machine that is lost, and no directory for snapshots is shared.
        """
        super().restore(str(self._snapshots / Path(path).name))

    def _map(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        raise ProtocolError("a client of a pool shares no memory with its workers")

    def _fetch(self, c: list[Any], i: int, frames: Sequence[Any]) -> int:
        if c[i + 4] is not None:
            raise ProtocolError("a client of a pool shares no memory with its workers")
        return super()._fetch(c, i, frames)
