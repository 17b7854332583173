"""Checkpoints being written: pieces of tensors go to their places in files while the worker runs further commands.

Values are copied when the command comes; a thread of its own writes the copies. The files are there already, in a
directory that is not the checkpoint yet: when all workers have said that their part is on the disk, the client makes it one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dtorch.core.config import check_roots, file_roots
from dtorch.core.errors import CommError
from dtorch.core.memory import copy, raw, write_all
from dtorch.core.pieces import slices
from dtorch.core.spec import Box, box_shape

# Taken when the process starts, and from nobody later: a client must not widen where it may write.
_ROOTS = file_roots()
Parts = Sequence[tuple[Box, Box]]
"""Boxes of a piece: in the whole tensor, and in the piece (``TensorSpec.parts``)."""
Report = Callable[[int, "list[str] | None"], None]


@dataclass
class _Save:
    """One checkpoint: the files open for it, and what went wrong (type, text)."""

    directory: str
    descriptors: dict[str, int] = field(default_factory=dict)
    fault: list[str] | None = None


class Saves:
    """The checkpoints that this worker takes part in, by the client's numbers.

    Args:
        report: says that all of a save is written, or why not; called on the thread that writes.
        roots: directories below which files must lie, links resolved; by default those of the process.
    """

    def __init__(self, report: Report, roots: Sequence[str] | None = None) -> None:
        self._report = report
        self._roots = _ROOTS if roots is None else roots
        self._saves: dict[int, _Save] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, number: int, directory: str) -> None:
        """Take part in a save."""
        self._saves[number] = _Save(directory)

    def end(self, number: int) -> None:
        """Forget a save."""
        save = self._saves.pop(number, None)
        if save is not None:
            self._do(lambda: _close(save))

    def write(
        self, number: int, file: str, offset: int, shape: Sequence[int], pieces: Sequence[tuple[torch.Tensor, Parts]]
    ) -> None:
        """Copy pieces of a tensor, and write them later.

        Args:
            number: of the save.
            file: its path below the save's directory.
            offset: in bytes, where the whole tensor begins in it, row-major.
            shape: of the whole tensor.
            pieces: with their boxes.

        Raises:
            RuntimeError, MemoryError: there is no memory for the copies.
        """
        save = self._saves[number]
        boxes: list[tuple[Box, torch.Tensor]] = []
        for piece, parts in pieces:
            for box, here in parts:
                held = torch.empty(box_shape(box), dtype=piece.dtype, device="cpu")
                copy(held, piece[slices(here)])
                boxes.append((box, held))
        if boxes:
            self._do(lambda: self._try(save, lambda: self._write(save, file, offset, shape, boxes)))

    def fail(self, number: int, kind: str, text: str) -> None:
        """Note that a tensor of a save has no value."""
        save = self._saves[number]
        save.fault = save.fault or [kind, text]

    def finish(self, number: int) -> None:
        """All of a save has been given: report when it is on the disk."""
        save = self._saves[number]

        def done() -> None:
            self._try(save, lambda: _sync(save))
            _close(save)
            with contextlib.suppress(CommError):  # the controller has ended, and so will this worker
                self._report(number, save.fault)

        self._do(done)

    def settle(self) -> None:
        """Wait until all that was given is on the disk.

        Raises:
            OSError: some of it cannot be written.
        """
        saves = list(self._saves.values())
        synced = threading.Event()

        def sync() -> None:
            for save in saves:
                self._try(save, lambda save=save: _sync(save))  # type: ignore[misc]
            synced.set()

        if saves:
            self._do(sync)
            synced.wait()
        for save in saves:
            if save.fault is not None:
                raise OSError(f"the checkpoint in {save.directory} could not be written: {save.fault[1]}")

    def close(self) -> None:
        """Forget everything; what is being written is written first."""
        for number in list(self._saves):
            self.end(number)
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="dtorch-writer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            job()
            del job  # and the copies that it holds

    @staticmethod
    def _try(save: _Save, do: Callable[[], None]) -> None:
        """Do a part of a save unless another has failed."""
        if save.fault is None:
            try:
                do()
            except Exception as e:  # a full disk, or whatever: somebody waits to hear of it
                save.fault = [type(e).__name__, str(e)]

    def _write(
        self, save: _Save, file: str, offset: int, shape: Sequence[int], boxes: Sequence[tuple[Box, torch.Tensor]]
    ) -> None:
        descriptor = save.descriptors.get(file)
        if descriptor is None:
            descriptor = save.descriptors[file] = self._open(os.path.join(save.directory, file))
        for box, held in boxes:
            data = memoryview(raw(held))
            at = 0
            for start, length in runs(shape, box, held.dtype.itemsize):
                write_all(descriptor, data[at : at + length], offset + start)
                at += length

    def _open(self, path: str) -> int:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            check_roots(os.readlink(f"/proc/self/fd/{descriptor}"), self._roots)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def runs(shape: Sequence[int], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Where a box lies in a row-major tensor: start and length of what is in one piece, in bytes, in the box's order."""
    last = max((d for d, (n, (a, b)) in enumerate(zip(shape, box, strict=True)) if b - a != n), default=-1)
    if last < 0:
        yield 0, math.prod(shape) * itemsize
        return
    strides = [math.prod(shape[d + 1 :]) * itemsize for d in range(len(shape))]
    low, high = box[last]
    for index in itertools.product(*(range(a, b) for a, b in box[:last])):
        start = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield start + low * strides[last], (high - low) * strides[last]


def _sync(save: _Save) -> None:
    for descriptor in save.descriptors.values():
        os.fsync(descriptor)


def _close(save: _Save) -> None:
    while save.descriptors:
        os.close(save.descriptors.popitem()[1])
