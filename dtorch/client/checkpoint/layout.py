"""Where the tensors of a state lie in safetensors files, and which devices write what."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.client.checkpoint.tree import Weights
from dtorch.client.weights import DTYPES
from dtorch.core.errors import DtorchError, refuse
from dtorch.core.spec import MeshLayout, TensorSpec

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_BYTES = 5_000_000_000  # of a file; where transformers cuts
_ALIGNMENT = 64  # of the first tensor


@dataclass(frozen=True)
class File:
    """A safetensors file.

    Attributes:
        path: below the checkpoint's directory.
        header: its first bytes.
        size: in bytes.
        places: of each tensor the name, and where it begins, in bytes.
    """

    path: str
    header: bytes
    size: int
    places: list[tuple[str, int]]


def lay_out(weights: Weights) -> tuple[list[File], dict[str, str]]:
    """The files of these tensors, to which their nodes point from now on; and further files as text: the index.

    Raises:
        DtorchError: tensors of types that the format does not have; all of them.
    """
    tensors = weights.tensors
    refuse(
        [f"{name!r} is of type {t.dtype}, which safetensors files do not have." for name, t in tensors.items()
         if t.dtype not in _NAMES], DtorchError,
    )  # fmt: skip
    shares = _shares(tensors)
    base = f"{weights.folder}/" if weights.folder else ""
    files: list[File] = []
    for number, names in enumerate(shares, 1):
        suffix = f"-{number:05d}-of-{len(shares):05d}" if len(shares) > 1 else ""
        path = f"{base}{weights.stem}{suffix}.safetensors"
        files.append(_file(path, {name: tensors[name] for name in names}))
        for name in names:
            weights.nodes[name]["file"] = path
    if len(shares) < 2:
        return files, {}
    table = {name: file.path.removeprefix(base) for file in files for name, _ in file.places}
    total = sum(map(_nbytes, tensors.values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
    return files, {f"{base}{weights.stem}.safetensors.index.json": json.dumps(index, indent=2)}


def _shares(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names by file."""
    found: list[list[str]] = []
    room = 0
    for name, t in tensors.items():
        n = _nbytes(t)
        if not found or n > room:
            found.append([])
            room = MOST_BYTES
        found[-1].append(name)
        room -= n
    return found


def _file(path: str, tensors: dict[str, torch.Tensor]) -> File:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places: list[tuple[str, int]] = []
    at = 0
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):  # so that each is aligned
        entries[name] = {"dtype": _NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [at, at + _nbytes(t)]}
        places.append((name, at))
        at += _nbytes(t)
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return File(path, header, len(header) + at, [(name, len(header) + start) for name, start in places])


def _nbytes(t: torch.Tensor) -> int:
    return math.prod(t.shape) * t.dtype.itemsize


class Writers:
    """Chooses for every part of a tensor one of the devices that hold it, so that each writes about as much."""

    def __init__(self) -> None:
        self._bytes: defaultdict[tuple[int, int], int] = defaultdict(int)

    def positions(self, spec: TensorSpec) -> list[int]:
        """The positions of the mesh whose devices write; together they write the tensor once."""
        found = []
        for count, holders in _holders(spec):
            best = min(holders, key=lambda p: self._bytes[_device(spec.mesh, p)])
            self._bytes[_device(spec.mesh, best)] += count * spec.dtype.itemsize
            found.append(best)
        return found


def _device(mesh: MeshLayout, position: int) -> tuple[int, int]:
    return mesh.session, mesh.devices[position]


@functools.lru_cache(4096)
def _holders(spec: TensorSpec) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The distinct parts: their numbers of elements, and the positions that hold them."""
    return tuple(_parts(spec))


def _parts(spec: TensorSpec) -> Iterator[tuple[int, tuple[int, ...]]]:
    found: dict[Any, list[int]] = {}
    for position in range(spec.mesh.size):
        found.setdefault(spec.spans(position), []).append(position)
    for positions in found.values():
        count = math.prod(spec.local_shape(positions[0]))
        if count:
            yield count, tuple(positions)
