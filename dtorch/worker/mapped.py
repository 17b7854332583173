"""Weights that stay in the page cache: a file mapped privately, and safe from whoever writes to the file later.

The kernel's read lease tells before somebody else opens the file for writing or cuts it, and holds them up meanwhile:
then what is in use is copied to memory of our own at the same addresses, and the lease is given back. Private pages that
were written to would not do: cutting the file takes them away as well. Where there is no lease, nothing is mapped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import sys
import threading
from types import FrameType
from typing import NoReturn

import torch

from dtorch.core.memory import map_pages, replace_pages, tensor_at, unmap_pages

_F_SETOWN_EX, _F_OWNER_TID = 15, 0  # fcntl.h


class LeasedFile:
    """A file whose parts can be memory of this process, shared with the page cache until either side writes.

    Args:
        descriptor: of the file, open for reading only; it may be closed afterwards.

    Raises:
        OSError: no lease is to be had: somebody has the file open for writing, it is another user's, or its file system
            has none; or this is not the main thread, which alone handles signals.
    """

    def __init__(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("a lease needs the main thread")
        signal.signal(signal.SIGIO, _on_lease_break)  # before there can be one, which would end the process
        self._descriptor = os.dup(descriptor)
        try:
            # Another thread would take the signal without waking this one.
            owner = struct.pack("ii", _F_OWNER_TID, threading.get_native_id())
            fcntl.fcntl(self._descriptor, _F_SETOWN_EX, owner)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._seen = os.fstat(self._descriptor).st_mtime_ns
        except BaseException:
            os.close(self._descriptor)
            raise
        self._open = True
        self._mappings: dict[int, int] = {}  # address -> bytes
        _leased.add(self)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Elements of the file as a flat tensor of its own; ``None`` when they are misaligned or the lease is gone.

        Raises:
            OSError: the kernel maps no more.
        """
        if not self._open or offset % dtype.itemsize:
            return None
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset - start + count * dtype.itemsize
        address = map_pages(length, mmap.MAP_PRIVATE, self._descriptor, start)
        self._mappings[address] = length
        return tensor_at(address, length, self._unmap)[offset - start :].view(dtype)

    def close(self) -> None:
        """Give out no more tensors; those there are stay."""
        self._open = False
        self._leave()

    def surrender(self) -> None:
        """If somebody waits for the lease, move what is in use to memory of our own and give the lease back."""
        if fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
            return
        self._open = False
        for address, length in self._mappings.items():
            replace_pages(address, length)
        if os.fstat(self._descriptor).st_mtime_ns != self._seen:
            raise OSError("a file was changed before the weights that are mapped from it could be saved")
        fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        self._mappings.clear()
        self._leave()

    def _unmap(self, address: int, length: int) -> None:
        self._mappings.pop(address, None)
        unmap_pages(address, length)
        self._leave()

    def _leave(self) -> None:
        """Close the file, and give up the lease with that, when nothing of it is mapped or can be."""
        if not self._open and not self._mappings and self in _leased:
            _leased.remove(self)
            os.close(self._descriptor)


_leased: set[LeasedFile] = set()


def _on_lease_break(signum: int, frame: FrameType | None) -> None:
    try:
        for file in list(_leased):
            file.surrender()
    except OSError as e:
        _die(str(e))


def _die(why: str) -> NoReturn:
    """End the worker: its weights cannot be trusted, and an exception here would be taken for that of an operator."""
    print(f"dtorch worker {os.getpid()}: {why}", file=sys.stderr, flush=True)
    os._exit(1)
