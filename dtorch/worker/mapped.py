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
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FAILED = ctypes.c_void_p(-1).value


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
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            self._seen = os.fstat(self._descriptor).st_mtime_ns
        except BaseException:
            os.close(self._descriptor)
            raise
        self._open = True
        self._mappings: dict[int, int] = {}  # address -> bytes
        _leased.add(self)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Elements of the file as a flat tensor of its own; ``None`` when that cannot be done."""
        if not self._open or offset % dtype.itemsize:
            return None
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        length = offset - start + count * dtype.itemsize
        address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, self._descriptor, start)
        if address == _FAILED:
            return None
        self._mappings[address] = length
        array = (ctypes.c_char * length).from_address(address)  # lives as long as the tensor's memory is used
        weakref.finalize(array, self._unmap, address, length).atexit = False
        return torch.frombuffer(array, dtype=dtype, count=count, offset=offset - start)

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
            _replace(address, length)
        if os.fstat(self._descriptor).st_mtime_ns != self._seen:
            _die("a file was changed before the weights that are mapped from it could be saved")
        self._mappings.clear()
        self._leave()

    def _unmap(self, address: int, length: int) -> None:
        _libc.munmap(address, length)
        self._mappings.pop(address, None)
        self._leave()

    def _leave(self) -> None:
        """Close the file, and give up the lease with that, when nothing of it is mapped or can be."""
        if not self._open and not self._mappings and self in _leased:
            _leased.remove(self)
            os.close(self._descriptor)


_leased: set[LeasedFile] = set()


def _on_lease_break(signum: int, frame: FrameType | None) -> None:
    for file in list(_leased):
        file.surrender()


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
