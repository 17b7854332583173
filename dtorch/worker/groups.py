"""Process groups between workers: made when first needed, for exactly the workers that need one, and re-formable.

A group is a torch.distributed backend (gloo for CPU tensors, NCCL for CUDA tensors) on a file store of its own; there
is no global process group. A group is a set of workers, written as a sorted tuple of worker numbers; a worker's rank is
its place in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
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
        directory: where the workers meet (one file per group), or ``tcp://host:port/name`` of a store for those on several
            machines; ``None`` when there are no other workers.
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
        self._shared: Any = None  # the connection to a store
        self._made: dict[Workers, Any] = {}
        self._broken: dict[Workers, str] = {}
        self.sent_messages = self.sent_bytes = 0
        weakref.finalize(self, self._made.clear)  # a group that outlives the interpreter aborts the process
        self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reset(self, generation: int) -> None:
        """Leave all groups; the next ones are formed anew among the members of this generation."""
        self.close()
        self._generation = generation

    def close(self) -> None:
        """Leave all groups."""
        self._made.clear()
        self._broken.clear()

    def exchange(
        self,
        workers: Workers,
        sends: Mapping[int, torch.Tensor],
        receives: Mapping[int, int],
        dtype: torch.dtype,
        what: str,
        into: torch.Tensor | None = None,
    ) -> dict[int, torch.Tensor]:
        """Send each worker its tensor and return what came from others; ends when both are done.

        One all-to-all of bytes. (Single sends and receives would do, but with gloo they make its event loop spin for
        whole time slices, 4 ms, when there are fewer cores than busy threads.)

        Args:
            workers: the group; all its members call this.
            sends: by worker number; other workers get nothing.
            receives: by worker number: how many elements come from it; together they match what the others send.
            dtype: of the elements.
            what: the operation, for the error text.
            into: a contiguous tensor for what comes, if it comes from one worker.

        Returns:
            By worker number, a flat tensor.

        Raises:
            CommError: a member ended, did not come in time, or the group failed before.
        """
        parts = [flat_bytes(sends[w]) for w in workers if w in sends]
        message = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._no_bytes
        given = [sends[w].nbytes if w in sends else 0 for w in workers]
        taken = [receives.get(w, 0) * dtype.itemsize for w in workers]
        into = torch.empty(sum(receives.values()), dtype=dtype, device=self.device) if into is None else flat(into)
        self.sent_messages += len(parts)
        self.sent_bytes += message.numel()
        self._start(workers, what, lambda group: group.alltoall_base(into.view(torch.uint8), message, taken, given))
        givers = [w for w in workers if w in receives]
        return dict(zip(givers, cut(into, [receives[w] for w in givers]), strict=True))

    def all_reduce(self, workers: Workers, tensor: torch.Tensor, reduce_op: str, what: str) -> None:
        """The backend's own all-reduce ("sum", "max", "min" or "product"), in place.

        Raises:
            CommError: as `exchange`.
        """
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[reduce_op]
        self._start(workers, what, lambda group: group.allreduce([tensor], options))

    def reduce_scatter(
        self, workers: Workers, out: torch.Tensor, terms: Sequence[torch.Tensor], reduce_op: str, what: str
    ) -> None:
        """The backend's own reduce-scatter: ``terms`` by rank, all of the shape of ``out``.

        Raises:
            CommError: as `exchange`.
        """
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE[reduce_op]
        self._start(workers, what, lambda group: group.reduce_scatter([out], [list(terms)], options))

    def all_gather(self, workers: Workers, outs: Sequence[torch.Tensor], tensor: torch.Tensor, what: str) -> None:
        """The backend's own all-gather: ``outs`` by rank, all of the shape of ``tensor``.

        Raises:
            CommError: as `exchange`.
        """
        self._start(workers, what, lambda group: group.allgather([list(outs)], [tensor]))

    def _start(self, workers: Workers, what: str, start: Callable[[Any], Any]) -> None:
        """Start an operation of the group and wait for its end."""
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
        timeout = timedelta(seconds=self.timeout_s)
        store = self._store(f"{self._generation}-{name}", len(workers), timeout)
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

    def _store(self, name: str, size: int, timeout: timedelta) -> Any:
        directory = self._directory
        assert directory is not None, "_make has looked"
        if not directory.startswith("tcp://"):
            return dist.FileStore(os.path.join(directory, name), size)  # type: ignore[attr-defined]
        address, _, prefix = directory.removeprefix("tcp://").partition("/")
        host, _, port = address.rpartition(":")
        if self._shared is None:
            self._shared = dist.TCPStore(  # type: ignore[attr-defined]
                host.strip("[]"), int(port), timeout=timeout, wait_for_workers=False
            )
        return dist.PrefixStore(f"{prefix}/{name}", self._shared)  # type: ignore[attr-defined]

    def _failed(self, workers: Workers, what: str, reason: Exception) -> CommError:
        """Give up the group (a message may be half sent, so its next one could be misread) and say what happened."""
        first_line = (str(reason) or type(reason).__name__).splitlines()[0]
        cause = re.sub(r"^\[\S*\] ", "", first_line).split(". ")[0].rstrip(".")
        text = (
            f"{what} between workers {_names(workers)} failed on worker {self.index}: {cause}. A worker of this "
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


def cut(tensor: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """A flat tensor in pieces."""
    return [tensor] if len(lengths) == 1 else tensor.split_with_sizes(lengths)


def _names(workers: Workers) -> str:
    return ", ".join(map(str, workers))
