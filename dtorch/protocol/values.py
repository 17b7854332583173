"""Plain values for arguments of operators: tensors become slots, torch's constants become tagged maps.

Everything here survives msgpack, and decoding can only produce the values listed: nothing on the wire runs code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dtorch.core.errors import ProtocolError
from dtorch.core.placements import Partial, Placement, Replicate, Shard
from dtorch.core.spec import MeshLayout, TensorSpec


@dataclass(frozen=True)
class Slot:
    """Stands for tensor argument number ``index`` of a call."""

    index: int


@dataclass(frozen=True)
class Number:
    """Stands for changing scalar number ``index`` of a call."""

    index: int


@dataclass(frozen=True)
class GeneratorSlot:
    """Stands for the random generator of the call."""


@dataclass(frozen=True)
class DeviceSlot:
    """Stands for the worker's own device."""


_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_FORMATS = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.memory_format)}
_LAYOUTS = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.layout)}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from(name: object) -> torch.dtype:
    """The inverse of ``dtype_name``.

    Raises:
        ProtocolError: no such dtype.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise ProtocolError(f"{name!r} is not a dtype.")
    return _DTYPES[name]


def encode(value: Any) -> Any:
    """A value as msgpack-able data.

    Raises:
        ProtocolError: a type that has no encoding; the text names it.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if kind is Slot:
        return {"t": value.index}
    if kind is Number:
        return {"n": value.index}
    if isinstance(value, torch.dtype):
        return {"d": dtype_name(value)}
    if kind is DeviceSlot:
        return {"x": 0}
    if kind is GeneratorSlot:
        return {"g": 0}
    if isinstance(value, torch.memory_format):
        return {"m": str(value).removeprefix("torch.")}
    if isinstance(value, torch.layout):
        return {"l": str(value).removeprefix("torch.")}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    raise ProtocolError(f"an argument of type {kind.__name__} cannot travel to the workers: {value!r:.80}")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "t": lambda v: Slot(int(v)),
    "n": lambda v: Number(int(v)),
    "d": dtype_from,
    "x": lambda v: DeviceSlot(),
    "g": lambda v: GeneratorSlot(),
    "m": _FORMATS.__getitem__,
    "l": _LAYOUTS.__getitem__,
    "c": lambda v: complex(float(v[0]), float(v[1])),
}


def decode(data: Any) -> Any:
    """The inverse of ``encode``.

    Raises:
        ProtocolError: an unknown tag.
    """
    if isinstance(data, list):
        return [decode(v) for v in data]
    if isinstance(data, dict):
        try:
            ((tag, value),) = data.items()
            return _DECODERS[tag](value)
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise ProtocolError(f"{data!r:.80} is no encoded argument.") from e
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    raise ProtocolError(f"an encoded argument of type {type(data).__name__}.")


def encode_placement(p: Placement) -> Any:
    """Shard -> its dimension, or a list of that, its unit and its segments; Replicate -> ``None``; Partial -> its reduction."""
    if isinstance(p, Shard):
        return [p.dim, p.unit, *p.segments] if p.segments or p.unit > 1 else p.dim
    return p.reduce_op if isinstance(p, Partial) else None


def decode_placement(data: Any) -> Placement:
    """The inverse of ``encode_placement``."""
    if data is None:
        return Replicate()
    if isinstance(data, list):
        dim, unit, *segments = map(int, data)
        return Shard(dim, tuple(segments), unit)
    return Shard(data) if isinstance(data, int) else Partial(data)


def encode_spec(spec: TensorSpec) -> list[Any]:
    """Mesh id, placements, shape, strides, dtype."""
    return [
        spec.mesh.id, [encode_placement(p) for p in spec.placements], list(spec.shape), list(spec.stride),
        dtype_name(spec.dtype),
    ]  # fmt: skip


def decode_spec(data: Any, meshes: dict[int, MeshLayout]) -> TensorSpec:
    """The inverse of ``encode_spec``.

    Raises:
        ProtocolError: malformed data or an unknown mesh.
    """
    try:
        mesh, placements, shape, stride, dtype = data
        placed = tuple(map(decode_placement, placements))
        layout = meshes[mesh]
        shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    except (ValueError, TypeError, KeyError) as e:
        raise ProtocolError(f"{data!r:.120} is no tensor spec.") from e
    bad = any(isinstance(p, Shard) and not 0 <= p.dim < len(shape) for p in placed)
    if bad or len(placed) != layout.ndim or len(shape) != len(stride) or any(n < 0 for n in shape):
        raise ProtocolError(f"{data!r:.120} is no tensor spec.")
    return TensorSpec(layout, placed, shape, stride, dtype_from(dtype))
