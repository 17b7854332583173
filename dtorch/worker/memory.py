"""Memory for values that come from the client or from files.

Fresh memory of the kernel's costs several times what writing to it does. Values that come again and again, as batches do,
have the same sizes, so large blocks are kept for the next value of the size.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Sequence

import torch

from dtorch.core.spec import TensorSpec, dense_strides

_LARGE_BYTES = 1 << 20
_MOST_SPARE_BYTES = 1 << 30
_spare: list[mmap.mmap] = []  # the longest unused first


def fresh(shape: Sequence[int], spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for a local part of this shape, in the memory order of the spec."""
    stride = dense_strides(shape, spec.shape, spec.stride)
    nbytes = math.prod(shape) * spec.dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE_BYTES:
        return torch.empty_strided(shape, stride, dtype=spec.dtype, device=device)
    block = next((b for b in _spare if len(b) == nbytes), None)
    if block is None:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        _spare.remove(block)
    array = (ctypes.c_char * nbytes).from_buffer(block)  # lives as long as the tensor's memory is used
    weakref.finalize(array, _keep, block).atexit = False
    return torch.frombuffer(array, dtype=spec.dtype).as_strided(shape, stride)


def _keep(block: mmap.mmap) -> None:
    block.madvise(mmap.MADV_FREE)  # the kernel may take the pages back when it is short of memory
    _spare.append(block)
    while sum(map(len, _spare)) > _MOST_SPARE_BYTES:
        _spare.pop(0)
