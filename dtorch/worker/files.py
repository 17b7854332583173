"""Values from files and from the client's shared memory: each device's part of them, and nothing more is read.

Files are read with ``pread``: a file that shrinks or a disk that fails is then an error and not the end of the process.
They are mapped only under a lease (``dtorch.worker.mapped``). Shared memory cannot shrink, which is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import mmap
import os
import re
import stat
from collections.abc import Sequence
from typing import Protocol

import torch

from dtorch.core.config import check_roots, file_roots
from dtorch.core.errors import ProtocolError
from dtorch.core.memory import copy, map_pages, raw, tensor_at
from dtorch.core.pieces import slices
from dtorch.core.spec import Box, TensorSpec, box_shape
from dtorch.core.steps import intersect
from dtorch.worker.mapped import LeasedFile
from dtorch.worker.memory import fresh

# Taken when the process starts, and from nobody later: a client must not widen what it may read.
_ROOTS = file_roots()
_STAGING_BYTES = 4 << 20  # what is read at a time when it must be converted or cut
_MAPPED_BYTES = 1 << 20  # smaller parts are read, not mapped
_SHORT_BYTES = 16 << 10  # shorter runs are read together with what lies between them
_SHARED_PATH = re.compile(r"/proc/\d+/fd/\d+")


class Source(Protocol):
    """Bytes that tensors are stored in, row-major."""

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype, box: Box, out: torch.Tensor) -> None:
        """Write the box of the tensor at ``offset`` to ``out``, which has the box's shape; converts the dtype."""


class SharedMemory:
    """Memory of the client.

    Raises:
        ProtocolError: the path does not name shared memory that cannot shrink.
    """

    def __init__(self, path: str) -> None:
        if not _SHARED_PATH.fullmatch(path):
            raise ProtocolError(f"{path!r} names no shared memory")
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            try:
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError as e:  # it is a file
                raise ProtocolError(f"{path!r} names no shared memory") from e
            if not seals & fcntl.F_SEAL_SHRINK:
                raise ProtocolError(f"the shared memory {path!r} could shrink while it is used")
            length = os.fstat(descriptor).st_size
            self._bytes = tensor_at(map_pages(length, mmap.MAP_SHARED, descriptor), length)
        finally:
            os.close(descriptor)

    def tensor(self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that lies there without gaps, not copied.

        Raises:
            ProtocolError: it does not fit.
        """
        end = offset + math.prod(shape) * dtype.itemsize
        if offset < 0 or end > len(self._bytes):
            raise ProtocolError(f"bytes {offset} to {end} of shared memory of {len(self._bytes)} bytes")
        return self._bytes[offset:end].view(dtype).as_strided(shape, stride)

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype, box: Box, out: torch.Tensor) -> None:
        """As ``Source.read``."""
        whole = self.tensor(offset, (math.prod(shape),), (1,), dtype).view(*shape)
        copy(out, whole[slices(box)])


class Bytes:
    """Bytes that came with a command."""

    def __init__(self, data: memoryview) -> None:
        self._flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype, box: Box, out: torch.Tensor) -> None:
        """As ``Source.read``."""
        end = offset + math.prod(shape) * dtype.itemsize
        copy(out, self._flat[offset:end].view(dtype).view(*shape)[slices(box)])


class File:
    """A file open for reading.

    Args:
        path: absolute.
        size, mtime_ns: as the client sees them; another file is refused.
        roots: directories below which it must lie, links resolved; ``None`` allows every file.
        maps: whether it may be mapped.

    Raises:
        OSError: it cannot be opened, or is not the one that the client sees.
        PermissionError: it lies below none of the roots.
    """

    def __init__(self, path: str, size: int, mtime_ns: int, roots: Sequence[str] | None, maps: bool) -> None:
        self._leased: LeasedFile | None = None
        self.path, self._seen = path, (size, mtime_ns)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold us up
        try:
            # Asked of what was opened: a link that is changed meanwhile leads nowhere else.
            check_roots(os.readlink(f"/proc/self/fd/{self._descriptor}"), roots)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                raise OSError(f"{path} is not a regular file")
            if maps:
                with contextlib.suppress(OSError, ValueError):  # no lease, or nothing in it to map: it is read
                    self._leased = LeasedFile(self._descriptor)
            self._check_same()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the file; what is mapped of it stays."""
        os.close(self._descriptor)
        if self._leased is not None:
            self._leased.close()

    def map(self, offset: int, shape: Sequence[int], dtype: torch.dtype, box: Box) -> torch.Tensor | None:
        """The box of the tensor at ``offset`` without copying it, if it is large and lies there in one piece."""
        row = math.prod(shape[1:])
        count = math.prod(box_shape(box))
        whole_rows = all(b - a == n for n, (a, b) in zip(shape[1:], box[1:], strict=True))
        if self._leased is None or not whole_rows or count * dtype.itemsize < _MAPPED_BYTES:
            return None
        flat = self._leased.tensor(offset + box[0][0] * row * dtype.itemsize, count, dtype)
        return None if flat is None else flat.view(box_shape(box))

    def _check_same(self) -> None:
        found = os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != self._seen:
            raise OSError(f"{self.path} was changed while it was being loaded")

    def read(self, offset: int, shape: Sequence[int], dtype: torch.dtype, box: Box, out: torch.Tensor) -> None:
        """As ``Source.read``.

        Raises:
            OSError: the file ends early, has been changed, or cannot be read.
        """
        # Dimensions behind the last one that is cut are one with it.
        last = max((d for d, (n, (a, b)) in enumerate(zip(shape, box, strict=True)) if b - a != n), default=0)
        rest = math.prod(shape[last + 1 :])
        shape = (*shape[:last], math.prod(shape[last:]))
        low, high = box[last] if box else (0, 1)
        box = (*box[:last], (low * rest, high * rest))
        out = out.view(box_shape(box))
        # Along `depth` it is read in one piece; dimensions behind it are read whole and cut in memory.
        run, depth = dtype.itemsize * (high - low) * rest, last
        while depth and run < _SHORT_BYTES:
            depth -= 1
            run = dtype.itemsize * math.prod(shape[depth + 1 :]) * (box[depth][1] - box[depth][0])
        row = math.prod(shape[depth + 1 :])
        low, high = box[depth]
        for index in itertools.product(*(range(a, b) for a, b in box[:depth])):
            start = 0
            for i, n in zip(index, shape, strict=False):
                start = start * n + i
            start = offset + (start * shape[depth] + low) * row * dtype.itemsize
            part = out[tuple(i - a for i, (a, _) in zip(index, box, strict=False))]
            self._read_rows(start, (high - low, *shape[depth + 1 :]), dtype, box[depth + 1 :], part)
        self._check_same()

    def _read_rows(
        self, start: int, shape: Sequence[int], dtype: torch.dtype, inner: Box, out: torch.Tensor
    ) -> None:
        """Read whole rows and keep the box ``inner`` of each."""
        if not inner and out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(start, out)
            return
        row = math.prod(shape[1:]) * dtype.itemsize
        step = min(shape[0], max(1, _STAGING_BYTES // row))
        staging = torch.empty((step, *shape[1:]), dtype=dtype, device="cpu")
        cut = (slice(None), *slices(inner))
        for first in range(0, shape[0], step):
            n = min(step, shape[0] - first)
            self._fill(start + first * row, staging[:n])
            copy(out[first : first + n], staging[:n][cut])

    def _fill(self, start: int, out: torch.Tensor) -> None:
        """Read the elements of a contiguous CPU tensor."""
        left = memoryview(raw(out))
        while left:
            n = os.preadv(self._descriptor, [left], start)
            if n == 0:
                raise OSError(f"{self.path} ends at byte {start}, in the middle of what was to be read")
            left, start = left[n:], start + n


class Files:
    """What a worker has open, by the client's numbers.

    Args:
        roots: see ``File``; by default those of the process.
        maps: whether large parts may stay in the file's memory: only in a process of its own, since whoever writes to
            the file later waits until Python code runs in this one.
    """

    def __init__(self, roots: Sequence[str] | None = None, maps: bool = False) -> None:
        self._roots = _ROOTS if roots is None else roots
        self._maps = maps
        self._sources: dict[int, SharedMemory | File] = {}

    def map(self, number: int, path: str) -> None:
        """Map the client's shared memory."""
        self._sources[number] = SharedMemory(path)

    def open(self, number: int, path: str, size: int, mtime_ns: int) -> None:
        """Open a file; see ``File`` for what it raises. A number that is open stays as it is."""
        if number not in self._sources:
            self._sources[number] = File(path, size, mtime_ns, self._roots, self._maps)

    def close(self, number: int) -> None:
        """Forget a file; unknown numbers are those that could not be opened."""
        source = self._sources.pop(number, None)
        if isinstance(source, File):
            source.close()

    def close_all(self) -> None:
        """Forget all files."""
        for number in list(self._sources):
            self.close(number)

    def source(self, number: int) -> Source:
        """What is open under this number."""
        return self._sources[number]


def load(
    source: Source, offset: int, dtype: torch.dtype, part: Box, spec: TensorSpec, positions: Sequence[int],
    device: torch.device, local: list[torch.Tensor] | None,
) -> list[torch.Tensor]:  # fmt: skip
    """What the devices at these positions hold after ``part`` of the tensor has come.

    Args:
        source, offset, dtype: where the part lies, and as what.
        part, spec, positions, device: what is wanted.
        local: what the devices hold of the parts before; ``None`` for the first.

    Raises:
        OSError, ProtocolError: see ``File`` and ``SharedMemory``.
    """
    shape = box_shape(part)
    found: list[torch.Tensor] = []
    for i, position in enumerate(positions):
        held = spec.parts(position)
        out = None if local is None else local[i]
        if len(held) == 1 and out is None and isinstance(source, File):
            box = held[0][0]
            if intersect(part, box) == box and (device.type, dtype) == ("cpu", spec.dtype):
                out = source.map(offset, shape, dtype, _relative(box, part))
                held = held if out is None else []
        if out is None:
            out = fresh(spec.local_shape(position), spec, device)
        for box, here in held:
            common = intersect(part, box)
            if common is not None:
                place = out[slices(here)][slices(_relative(common, box))]
                source.read(offset, shape, dtype, _relative(common, part), place)
        found.append(out)
    return found


def _relative(box: Box, within: Box) -> Box:
    return tuple((a - start, b - start) for (a, b), (start, _) in zip(box, within, strict=True))
