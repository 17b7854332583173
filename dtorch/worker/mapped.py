"""Weights that stay in the page cache: a file mapped privately, and safe from whoever writes to the file later.

The kernel's read lease tells before somebody else opens the file for writing or cuts it, and holds them up meanwhile:
then what is in use is copied to memory of our own at the same addresses, and the lease is given back. Where there is no
lease, nothing is mapped.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import NoReturn

import torch

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


class LeasedFile:
    """A file as memory of this process, shared with the page cache until either side writes.

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
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._seen = os.fstat(self._descriptor).st_mtime_ns
            memory = mmap.mmap(self._descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._memory: mmap.mmap | None = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._used: list[tuple[int, int]] = []
        # The tensors keep the mapping alive, and the mapping this object with the lease.
        weakref.finalize(memory, self._release).atexit = False
        _leased.add(self)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Elements of the file as a flat tensor; ``None`` when they are misaligned or the lease is gone."""
        end = offset + count * dtype.itemsize
        if self._memory is None or offset % dtype.itemsize or end > len(self._memory):
            return None
        self._used.append((offset, end))
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def close(self) -> None:
        """Give out no more tensors; those there are stay."""
        self._memory = None

    def surrender(self) -> None:
        """If somebody waits for the lease, move what is in use to memory of our own and give the lease back."""
        if fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) == fcntl.F_RDLCK:
            return
        for low, high in _pages(self._used):
            _replace(self._address + low, high - low)
        self._memory = None
        if os.fstat(self._descriptor).st_mtime_ns != self._seen:
            _die(f"file {self._descriptor} was changed before the weights that are mapped from it could be saved")
        _leased.discard(self)
        fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _release(self) -> None:
        _leased.discard(self)
        os.close(self._descriptor)


_leased: weakref.WeakSet[LeasedFile] = weakref.WeakSet()


def _on_lease_break(signum: int, frame: FrameType | None) -> None:
    for file in list(_leased):
        file.surrender()


def _pages(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages of these byte ranges, in runs that do not overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        low, high = first // mmap.PAGESIZE * mmap.PAGESIZE, -(-last // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def _replace(address: int, nbytes: int) -> None:
    """Put anonymous memory with the same contents in the place of a mapping.

    Private pages that were written to would not do: cutting the file takes them away as well.
    """
    copy = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if copy == _FAILED:
        _die(f"there is no memory for {nbytes} bytes of weights whose file is about to be changed")
    ctypes.memmove(copy, address, nbytes)
    if _libc.mremap(copy, nbytes, nbytes, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) != address:
        _die(f"mremap of {nbytes} bytes failed: {os.strerror(ctypes.get_errno())}")


def _die(why: str) -> NoReturn:
    """End the worker: its weights cannot be trusted, and an exception could be taken for that of an operator."""
    print(f"dtorch worker {os.getpid()}: {why}", file=sys.stderr, flush=True)
    os._exit(1)
