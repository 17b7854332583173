"""Process groups between workers: made when first needed, for exactly the workers that need one, and re-formable.

A group is a torch.distributed backend (gloo for CPU tensors, NCCL for CUDA tensors) on a file store of its own; there
is no global process group. A group is a set of workers, written as a sorted tuple of worker numbers; a worker's rank is
its place in it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtorch.core.errors import CommError

Workers = tuple[int, ...]


class Groups:
    """The process groups of one worker.

    Args:
        index: this worker's number.
        directory: where the workers meet (one file per group); ``None`` when there are no other workers.
        timeout_s: how long to wait for the other members, in making a group and in each operation.
        device: where the tensors live; decides between gloo and NCCL.
        hostname: the address on which this worker listens for the others (gloo).

    Attributes:
        sent_messages, sent_bytes: what this worker has sent to others by `exchange`.
    """

    def __init__(
        self, index: int, directory: str | None, timeout_s: float, device: torch.device, hostname: str = "127.0.0.1"
    ) -> None:
        self.index, self.device, self.timeout_s = index, device, timeout_s
        self._directory, self._hostname = directory, hostname
        self._generation = 0
        self._made: dict[Workers, Any] = {}
        self._broken: dict[Workers, str] = {}
        self.sent_messages = self.sent_bytes = 0

    def reset(self, generation: int) -> None:
        """Leave all groups; the next ones are formed anew among the members of this generation."""
        self.close()
        self._generation = generation

    def close(self) -> None:
        """Leave all groups."""
        self._made.clear()
        self._broken.clear()

    def exchange(
        self, workers: Workers, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], what: str
    ) -> None:
        """Send each worker its tensor and fill the tensors that come from others; ends when both are done.

        All tensors are contiguous and not empty; a tensor sent has as many bytes as the one that receives it.

        Args:
            workers: the group; all its members call this.
            sends, receives: by worker number.
            what: the operation, for the error text.

        Raises:
            CommError: a member ended, did not come in time, or the group failed before.
        """
        group = self._group(workers, what)
        for t in sends.values():
            self.sent_messages += 1
            self.sent_bytes += t.nbytes
        try:
            if self.device.type == "cuda":
                nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
                ins = [flat_bytes(sends[w]) if w in sends else nothing for w in workers]
                outs = [flat_bytes(receives[w]) if w in receives else nothing for w in workers]
                group.alltoall(outs, ins).wait()
                return
            rank = workers.index
            works = [group.recv([t], rank(w), 0) for w, t in receives.items()]
            works += [group.send([t], rank(w), 0) for w, t in sends.items()]
            for work in works:
                work.wait()
        except RuntimeError as e:
            raise self._failed(workers, what, e) from e

    def all_reduce(self, workers: Workers, tensor: torch.Tensor, reduce_op: str, what: str) -> None:
        """The backend's own all-reduce ("sum", "max", "min" or "product"), in place.

        Raises:
            CommError: as `exchange`.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[reduce_op]
        self._native(workers, what, lambda group: group.allreduce([tensor], options))

    def reduce_scatter(
        self, workers: Workers, out: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str, what: str
    ) -> None:
        """The backend's own reduce-scatter: ``terms`` by rank, all of the shape of ``out``.

        Raises:
            CommError: as `exchange`.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE[reduce_op]
        self._native(workers, what, lambda group: group.reduce_scatter([out], [list(terms)], options))

    def all_gather(self, workers: Workers, outs: Sequence[torch.Tensor], tensor: torch.Tensor, what: str) -> None:
        """The backend's own all-gather: ``outs`` by rank, all of the shape of ``tensor``.

        Raises:
            CommError: as `exchange`.
        """
        self._native(workers, what, lambda group: group.allgather([list(outs)], [tensor]))

    def _native(self, workers: Workers, what: str, start: Any) -> None:
        group = self._group(workers, what)
        try:
            start(group).wait()
        except RuntimeError as e:
            raise self._failed(workers, what, e) from e

    def _group(self, workers: Workers, what: str) -> Any:
        """The group of these workers, made on first use: all members come here at the same point of the stream."""
        group = self._made.get(workers)
        if group is not None and not self._broken:
            return group
        if workers in self._broken:
            raise CommError(
                f"{what} between workers {_names(workers)}: their process group failed earlier and waits to be formed "
                f"anew. The first failure was: {self._broken[workers]}"
            )
        if group is None:
            try:
                group = self._make(workers)
            except RuntimeError as e:
                raise self._failed(workers, what, e) from e
            self._made[workers] = group
        return group

    def _make(self, workers: Workers) -> Any:
        if self._directory is None:
            raise RuntimeError("this worker was started without a rendezvous directory, so it cannot meet others")
        name = hashlib.blake2s(repr(workers).encode(), digest_size=16).hexdigest()
        path = os.path.join(self._directory, f"{self._generation}-{name}")
        store = dist.FileStore(path, len(workers))  # type: ignore[attr-defined]
        timeout = timedelta(seconds=self.timeout_s)
        store.set_timeout(timeout)
        rank, size = workers.index(self.index), len(workers)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, options)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._hostname)]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _failed(self, workers: Workers, what: str, reason: Exception) -> CommError:
        """Give up the group (a message may be half sent, so its next one could be misread) and say what happened."""
        first_line = (str(reason) or type(reason).__name__).splitlines()[0]
        text = (
            f"{what} between workers {_names(workers)} failed on worker {self.index}: {first_line}. A worker of this "
            f"group has ended, or did not reach this operation within {self.timeout_s:g} s."
        )
        self._made.pop(workers, None)
        self._broken[workers] = text
        return CommError(text)


_REDUCE: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as one dimension; of a contiguous tensor not a copy.

    A contiguous tensor may have any stride where its size is 1 or 0, and `view` can keep that one, hence `as_strided`.
    """
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`flat`, as bytes."""
    return flat(tensor).view(torch.uint8)


def _names(workers: Workers) -> str:
    return ", ".join(map(str, workers))
