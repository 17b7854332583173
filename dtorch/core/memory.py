"""Memory of plain CPU tensors: their bytes, and tensors in memory that the kernel maps for us.

Python's ``mmap`` would do, if each of its objects did not keep a descriptor of its own; a process has few of those, and
a model many tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import torch

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # sys/mman.h
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p


def raw(t: torch.Tensor) -> Any:
    """The bytes of a contiguous CPU tensor as a numpy array that shares its memory."""
    flat = t.as_strided((t.numel(),), (1,))  # one element may have any stride, which view(dtype) refuses
    return flat.view(torch.uint8).numpy()


def copy(out: torch.Tensor, t: torch.Tensor) -> None:
    """``out.copy_(t)``, on one thread where bytes are all that is copied.

    torch would wake its threads for every piece, which on busy cores takes longer than the copying.
    """
    plain = out.dtype == t.dtype and out.shape == t.shape and out.device == t.device and t.device.type == "cpu"
    if plain and t.numel() and out.is_contiguous() and t.is_contiguous() and not (t.is_conj() or t.is_neg()):
        numpy.copyto(raw(out), raw(t))
    else:
        out.copy_(t)


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Write all bytes from ``start`` on.

    Raises:
        OSError: the disk is full, or fails.
    """
    while data:
        n = os.pwrite(descriptor, data, start)
        data, start = data[n:], start + n


def map_pages(length: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    """Map pages that can be read and written; returns their address.

    Args:
        length: in bytes.
        flags: ``mmap.MAP_PRIVATE`` and so on.
        descriptor, offset: of the file, from a page's start on; for ``MAP_ANONYMOUS`` there is none.

    Raises:
        OSError: the kernel refuses.
    """
    address: int | None = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address is None or address == _FAILED:
        raise OSError(ctypes.get_errno(), f"mapping {length} bytes: {os.strerror(ctypes.get_errno())}")
    return address


def unmap_pages(address: int, length: int) -> None:
    """Give mapped pages back."""
    _libc.munmap(address, length)


def offer_pages(address: int, length: int) -> None:
    """Keep pages whose contents do not matter, unless the kernel is short of memory."""
    _libc.madvise(address, length, mmap.MADV_FREE)


def replace_pages(address: int, length: int) -> None:
    """Put anonymous memory with the same contents in the place of a mapping.

    Raises:
        OSError: there is no memory.
    """
    there = map_pages(length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memmove(there, address, length)
    if _libc.mremap(there, length, length, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) != address:
        raise OSError(ctypes.get_errno(), f"moving {length} bytes: {os.strerror(ctypes.get_errno())}")


def tensor_at(address: int, length: int, release: Callable[[int, int], None] = unmap_pages) -> torch.Tensor:
    """The bytes there as a tensor; ``release(address, length)`` is called when nothing uses them any more."""
    array = (ctypes.c_char * length).from_address(address)  # lives as long as the tensor's memory is used
    weakref.finalize(array, release, address, length).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def trim_heap() -> None:
    """Return what the heap keeps for later to the system, where its library can (glibc's)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
