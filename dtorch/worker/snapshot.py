"""What a worker holds, in a file: its tensors with the memory they share, lost values and generators.

The file begins with the length of a msgpack header, as u64. Then come the header and the bytes of the storages, each at a
multiple of 64. Nothing in it runs code.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from dtorch.core.errors import ProtocolError
from dtorch.protocol.values import dtype_from, dtype_name

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64


@dataclass
class Snapshot:
    """The state of a worker.

    Attributes:
        tensors: local tensors by id.
        lost: serial and text of lost values, by id.
        generators: states, by number.
        serial: number of the next operator.
    """

    tensors: dict[int, list[torch.Tensor]]
    lost: dict[int, tuple[int, str]]
    generators: dict[int, torch.Tensor]
    serial: int


def save(path: str, snapshot: Snapshot) -> None:
    """Write a snapshot.

    Raises:
        OSError: it cannot be written; nothing is left at the path.
    """
    storages: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = {}
    tensors = [[number, [_describe(t, storages) for t in local]] for number, local in snapshot.tensors.items()]
    header = msgpack.packb(
        {
            "tensors": tensors,
            "storages": [storage.nbytes() for _, storage in storages.values()],
            "lost": [[number, *why] for number, why in snapshot.lost.items()],
            "generators": [[number, bytes(state.numpy())] for number, state in snapshot.generators.items()],
            "serial": snapshot.serial,
        }
    )
    needed = sum(storage.nbytes() for _, storage in storages.values())
    file_system = os.statvfs(os.path.dirname(path))
    free = file_system.f_bavail * file_system.f_frsize
    if needed > free // 2:  # others need some as well
        raise OSError(errno.ENOSPC, f"a snapshot of {needed} bytes where {free} are free", path)
    try:
        with open(path, "wb") as file:
            file.write(_LENGTH.pack(len(header)))
            file.write(header)
            for _, storage in storages.values():
                file.seek(_aligned(file.tell()))
                file.write(_bytes(storage))
            file.truncate(_aligned(file.tell()))
    except OSError:
        if os.path.exists(path):
            os.remove(path)
        raise


def load(path: str, device: torch.device) -> Snapshot:
    """Read a snapshot of ``save``.

    Raises:
        OSError, ProtocolError: there is none.
    """
    with open(path, "rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = msgpack.unpackb(file.read(length), strict_map_key=False)
        storages = []
        for nbytes in header["storages"]:
            file.seek(_aligned(file.tell()))
            flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes and file.readinto(flat.numpy().data) != nbytes:
                raise ProtocolError(f"the snapshot {path} was cut off")
            storages.append(flat.to(device).untyped_storage())
    return Snapshot(
        {number: [_rebuild(row, storages, device) for row in local] for number, local in header["tensors"]},
        {number: (serial, text) for number, serial, text in header["lost"]},
        {number: torch.frombuffer(bytearray(state), dtype=torch.uint8) for number, state in header["generators"]},
        header["serial"],
    )


def _describe(t: torch.Tensor, storages: dict[tuple[int, int], tuple[int, torch.UntypedStorage]]) -> list[Any]:
    storage = t.untyped_storage()
    place, _ = storages.setdefault((storage.data_ptr(), storage.nbytes()), (len(storages), storage))
    return [
        place, dtype_name(t.dtype), t.storage_offset(), list(t.shape), list(t.stride()), t.is_conj(), t.is_neg(),
    ]  # fmt: skip


def _rebuild(row: list[Any], storages: list[torch.UntypedStorage], device: torch.device) -> torch.Tensor:
    place, dtype, offset, shape, stride, is_conj, is_neg = row
    t = torch.empty(0, dtype=dtype_from(dtype), device=device).set_(storages[place], offset, shape, stride)
    t = t.conj() if is_conj else t
    return torch.ops.aten._neg_view.default(t) if is_neg else t


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat.cpu().numpy().data


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
