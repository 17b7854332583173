"""Weights that stay in the page cache: a file mapped privately, safe from whoever writes to the file later.

The kernel's read lease tells before somebody else opens the file for writing, and holds them up meanwhile: then every
page in use is copied, and the lease is given back. Without a lease nothing is mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import threading
import weakref
from types import FrameType

import numpy
import torch


class LeasedFile:
    """Parts of a file as memory of this process, shared with the page cache until one side writes.

    Args:
        descriptor: open for reading only; copied, so the file can be closed.

    Raises:
        OSError: there is no lease: somebody writes to the file, it belongs to another user, or its file system has none.
    """

    def __init__(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("signals are handled in the main thread only")
        signal.signal(signal.SIGIO, _on_signal)  # before there can be one, which would end the process
        self._ranges: list[tuple[int, int]] = []
        self._descriptor = os.dup(descriptor)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            memory = mmap.mmap(self._descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._memory: mmap.mmap | None = memory
        self._seen = os.fstat(self._descriptor).st_mtime_ns
        _leased.add(self)
        # Tensors hold the mapping, and the mapping this object and so the lease.
        weakref.finalize(memory, self._release)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Elements of the file as a flat tensor; ``None`` when that would be misaligned, or the lease was given back."""
        if self._memory is None or offset % dtype.itemsize:
            return None
        self._ranges.append((offset, offset + count * dtype.itemsize))
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Map no more; what is mapped stays as long as its tensors."""
        self._memory = None

    def surrender(self) -> None:
        """Make private copies in place of all pages in use, and give the lease back, if somebody waits for it.

        Raises:
            OSError: it came too late, and the file has been changed.
        """
        if fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
            return
"""
