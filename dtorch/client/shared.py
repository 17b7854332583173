"""Memory shared with the workers of this machine: values too large for the stream go through it.

It has no name in any directory: workers open it through this process's descriptor, and it is gone with the last process
that maps it, however that ends.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch

from dtorch.core.memory import copy, map_pages, tensor_at
from dtorch.core.spec import Box, TensorSpec
from dtorch.protocol import commands as C
from dtorch.protocol.values import dtype_name

if TYPE_CHECKING:
    from dtorch.client.session import Session
    from dtorch.client.sites import Site

ARENA = 0
"""The arena's number among the session's files."""
_SLOT_BYTES = 8 << 20  # about what stays in the processor's cache between the writer and the reader
_SLOTS = 8


class Segment:
    """Shared memory of this process; freed when it and all mappings are dropped.

    Raises:
        OSError: the kernel gives none.
    """

    live: ClassVar[int] = 0  # each holds one of the process's descriptors, of which there may be few

    def __init__(self, nbytes: int) -> None:
        self._descriptor = -1
        self._descriptor = os.memfd_create("dtorch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        Segment.live += 1
        self._nbytes = nbytes
        os.ftruncate(self._descriptor, nbytes)
        # Workers map only what cannot shrink under them.
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def bytes(self, flags: int) -> torch.Tensor:
        """All of it, mapped with ``mmap.MAP_SHARED`` or ``MAP_PRIVATE``; holds the memory by itself."""
        return tensor_at(map_pages(self._nbytes, flags, self._descriptor), self._nbytes)

    def close(self) -> None:
        """Let go of the descriptor; mappings stay. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            Segment.live -= 1

    __del__ = close


class Arena:
    """Uploads by pieces: the client writes one into a slot of shared memory while the workers read those before it.

    The slots are used again and again, so that neither side pays for fresh memory.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._segment: Segment | None = None
        self._free: deque[tuple[int, int]] = deque()  # offset of a slot, and the batch that must be acknowledged first

    def send(self, tensor_id: int, spec: TensorSpec, t: torch.Tensor, site: Site) -> None:
        """Upload a plain CPU tensor of the spec's shape and of any dtype; it may be changed when this returns.

        Raises:
            SessionClosedError, CommError, WorkerLostError: the session cannot go on.
        """
        session = self._session
        with session.lock:
            if self._segment is None:
                self._start()
            number, name = session.spec_id(spec), dtype_name(spec.dtype)
            try:
                for piece, box in pieces(t, _SLOT_BYTES // spec.dtype.itemsize):
                    offset, used_by = self._free[0]
                    session.acknowledged(used_by)
                    end = offset + piece.numel() * spec.dtype.itemsize
                    copy(self._bytes[offset:end].view(spec.dtype).view(piece.shape), piece)
                    session.sites.append(site)
                    session.buf.extend((C.LOAD, tensor_id, number, ARENA, offset, name, box, "a plain tensor"))
                    session.shares = True
                    self._free.rotate(-1)
                    self._free[-1] = offset, session.flush()
            except BaseException:
                session.buf.append(-tensor_id)
                raise

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None
            del self._bytes

    def _start(self) -> None:
        self._segment = Segment(_SLOTS * _SLOT_BYTES)
        self._bytes = self._segment.bytes(mmap.MAP_SHARED)
        self._free.extend((slot * _SLOT_BYTES, 0) for slot in range(_SLOTS))
        self._session.define(C.MAP, ARENA, self._segment.path)


def pieces(t: torch.Tensor, limit: int, outer: Box = ()) -> Iterator[tuple[torch.Tensor, Box]]:
    """Parts of at most ``limit`` elements, in row-major order, each with its box in ``t`` behind the box ``outer``."""
    rest = tuple((0, n) for n in t.shape)
    if t.numel() <= limit:
        yield t, (*outer, *rest)
        return
    row = math.prod(t.shape[1:])
    if row > limit:
        for i, part in enumerate(t):
            yield from pieces(part, limit, (*outer, (i, i + 1)))
        return
    step = limit // row
    for low in range(0, len(t), step):
        high = min(low + step, len(t))
        yield t[low:high], (*outer, (low, high), *rest[1:])
