"""``dtorch.load_safetensors``: weights from files straight to the devices that hold them.

The headers are read here and checked against the files before anything is placed; the values are read by the workers,
each its own part.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtorch.client import wrap
from dtorch.client.factories import locate
from dtorch.client.files import RefusedError
from dtorch.client.session import Session
from dtorch.client.sites import Site, caller
from dtorch.core.errors import LoadError, PlacementError, refuse
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import REPLICATE, Placement, normalize
from dtorch.core.spec import MeshLayout, contiguous_strides

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000  # the format's limit

Placements = Callable[[str, tuple[int, ...]], "Sequence[Any] | None"] | Mapping[str, Sequence[Any]] | None


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file.

    Attributes:
        path: of the file, links resolved.
        shape, dtype: of the tensor.
        offset: in bytes, of its row-major elements in the file.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def load_safetensors(
    path: str | os.PathLike[str],
    device_mesh: DeviceMesh | None = None,
    placements: Placements = None,
    *,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """The tensors of a safetensors file, each part read by the worker that holds it; does not wait for that.

    Args:
        path: a file, an index (``*.safetensors.index.json``), or a directory with one of them or one file.
        device_mesh: where the tensors go; by default the default mesh.
        placements: a dict or function of name (and shape) to placements, ``None`` for replicated; by default all are.
        dtype: convert floating-point tensors to this.

    Returns:
        name -> distributed tensor.

    Raises:
        LoadError: a file is missing, damaged or must not be read; nothing has been placed.
        PlacementError: placements that do not fit, or for names that the file does not have; likewise.
    """
    stored = read_headers(path)
    session, mesh = locate(device_mesh, None)
    where = _place(stored, placements, mesh.ndim, path)
    site = caller(sys._getframe(1))
    found: dict[str, Any] = {}
    for name, one in stored.items():
        kind = dtype if dtype is not None and one.dtype.is_floating_point else one.dtype
        found[name] = load_one(session, mesh, where[name], one, name, kind, site)
    return found


def load_one(
    session: Session, mesh: MeshLayout, placements: tuple[Placement, ...], one: Stored, name: str, dtype: torch.dtype,
    site: Site,
) -> Any:  # fmt: skip
    """One tensor from its file on a mesh, as this dtype; does not wait.

    Raises:
        LoadError: it cannot be read, or must not.
    """
    held = tuple(REPLICATE if p.is_partial() else p for p in placements)
    spec = session.make_spec(mesh, held, one.shape, contiguous_strides(one.shape), dtype)
    new = session.ids()
    try:
        if session.config.null_workers:
            raise RefusedError("null workers read nothing", forbidden=False)
        session.files.load(new, spec, one.path, one.offset, one.dtype, f"{name!r} from {one.path}", site)
        found = wrap.wrap(session, new, spec)
    except RefusedError as e:
        if e.forbidden:
            raise LoadError(f"{name!r} is not loaded: {e}") from e
        # The workers are elsewhere and do not see this file.
        found = wrap.put(session, mapped(one), mesh, held, dtype)
    except OSError as e:
        raise LoadError(f"{name!r} cannot be loaded from {one.path}: {e}") from e
    return found if held == placements else found.redistribute(placements=list(placements))


def read_headers(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of a file, an index or a directory, as ``load_safetensors`` takes them.

    Raises:
        LoadError: a file is missing or damaged, or lacks what the index says.
    """
    here = Path(path)
    if here.is_dir():
        found = sorted(here.glob("*.safetensors.index.json")) or sorted(here.glob("*.safetensors"))
        if len(found) != 1:
            names = ", ".join(p.name for p in found) or "none"
            raise LoadError(f"{here} must hold one safetensors file or one index of several, and holds {names}.")
        here = found[0]
    if here.suffix != ".json":
        return read_header(here)
    try:
        weight_map = json.loads(here.read_bytes())["weight_map"]
        files = {name: read_header(here.parent / name) for name in sorted(set(weight_map.values()))}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise LoadError(f"{here} is no index of safetensors files: it has no table 'weight_map' of names to files.") from e
    except FileNotFoundError as e:
        raise LoadError(f"{here} does not exist.") from e
    for name, file in weight_map.items():
        if name not in files[file]:
            raise LoadError(f"{here.parent / file} has no tensor {name!r}, which {here.name} says is there.")
    return {name: files[file][name] for name, file in weight_map.items()}


def read_header(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """The tensors of one safetensors file, checked against its size; no value is read.

    Raises:
        LoadError: it is missing, truncated or damaged.
    """
    try:
        real = os.path.realpath(path, strict=True)
        size = os.stat(real).st_size
        with open(real, "rb") as file:
            length = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b"\xff"))[0]
            if length > min(size - _LENGTH.size, _MOST_HEADER_BYTES):
                raise LoadError(f"{path} is no safetensors file, or was cut off: its header does not fit into {size} bytes.")
            header = json.loads(file.read(length))
    except ValueError as e:
        raise LoadError(f"{path} is no safetensors file: its header is not JSON.") from e
    except LoadError:
        raise
    except OSError as e:
        raise LoadError(f"{path} cannot be read: {e.strerror or e}.") from e
    if not isinstance(header, dict):
        raise LoadError(f"{path} is no safetensors file: its header is no table.")
    start = _LENGTH.size + length
    return {
        name: _stored(path, real, name, entry, start, size) for name, entry in header.items() if name != "__metadata__"
    }


def _stored(path: Any, real: str, name: str, entry: Any, start: int, size: int) -> Stored:
    """One entry of a header."""
    try:
        shape, (low, high) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        dtype = DTYPES[entry["dtype"]]
    except (KeyError, TypeError, ValueError) as e:
        raise LoadError(f"{path}: the header's entry for {name!r} cannot be used: {entry!r:.200}.") from e
    if min((low, *shape)) < 0 or high - low != math.prod(shape) * dtype.itemsize:
        raise LoadError(f"{path}: {name!r} of shape {shape} and type {entry['dtype']} cannot lie at bytes {low} to {high}.")
    if start + high > size:
        raise LoadError(f"{path} was cut off: {name!r} ends at byte {start + high}, and the file has {size}.")
    return Stored(real, shape, dtype, start + low)


def _place(stored: Mapping[str, Stored], placements: Placements, ndim: int, path: Any) -> dict[str, tuple[Placement, ...]]:
    """Placements of every tensor; all faults at once."""
    faults: list[str] = []
    if isinstance(placements, Mapping):
        faults.extend(f"{path} has no tensor {name!r} to place." for name in placements if name not in stored)
    found: dict[str, tuple[Placement, ...]] = {}
    for name, one in stored.items():
        if isinstance(placements, Mapping):
            wanted = placements.get(name)
        else:
            wanted = placements(name, one.shape) if placements is not None else None
        try:
            found[name] = normalize(wanted, ndim, len(one.shape))
        except PlacementError as e:
            faults.append(f"{name!r} of shape {one.shape}: {e}")
    refuse(faults)
    return found


def mapped(one: Stored) -> torch.Tensor:
    """The tensor as a plain one whose memory is the file's."""
    nbytes = math.prod(one.shape) * one.dtype.itemsize
    if not nbytes:
        return torch.empty(one.shape, dtype=one.dtype, device="cpu")
    data = torch.from_file(one.path, shared=False, size=one.offset + nbytes, dtype=torch.uint8, device="cpu")
    part = data[one.offset :]
    return (part if one.offset % one.dtype.itemsize == 0 else part.clone()).view(one.dtype).view(one.shape)
