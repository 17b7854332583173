"""Memory for values that come from the client or from files.

Fresh memory of the kernel's costs several times what writing to it does. Values that come again and again, as batches do,
have the same sizes, so large blocks are kept for the next value of the size.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from dtorch.core.memory import map_pages, offer_pages, tensor_at, trim_heap, unmap_pages
from dtorch.core.spec import TensorSpec, dense_strides

_LARGE_BYTES = 1 << 20
_MOST_SPARE_BYTES = 1 << 30
_spare: list[tuple[int, int]] = []  # bytes and address, the longest unused first


def fresh(shape: Sequence[int], spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Uninitialised memory for a local part of this shape, in the memory order of the spec."""
    stride = dense_strides(shape, spec.shape, spec.stride)
    nbytes = math.prod(shape) * spec.dtype.itemsize
    if device.type != "cpu" or nbytes < _LARGE_BYTES:
        return torch.empty_strided(shape, stride, dtype=spec.dtype, device=device)
    block = next((b for b in _spare if b[0] == nbytes), None)
    if block is None:
        address = map_pages(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:
        _spare.remove(block)
        address = block[1]
    return tensor_at(address, nbytes, _keep).view(spec.dtype).as_strided(shape, stride)


def give_back(device: torch.device) -> int:
    """Return memory that no tensor uses to the system; how many bytes, as far as that is known."""
    spare = sum(n for n, _ in _spare)
    while _spare:
        n, address = _spare.pop()
        unmap_pages(address, n)
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.empty_cache()
        spare += reserved - torch.cuda.memory_reserved(device)
    else:
        trim_heap()
    return spare


def _keep(address: int, nbytes: int) -> None:
    offer_pages(address, nbytes)
    _spare.append((nbytes, address))
    while sum(n for n, _ in _spare) > _MOST_SPARE_BYTES:
        n, unused = _spare.pop(0)
        unmap_pages(unused, n)
