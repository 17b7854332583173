"""A state as JSON and tensors.

What JSON has is itself. Everything else is an object with the key "$", which says what it is; tensors name a file and
their place in it. Nothing in it runs code.
"""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dtorch.client import random
from dtorch.client.aliasing import refresh
from dtorch.client.tensor import DTensor
from dtorch.client.wrap import reduced
from dtorch.core.errors import DtorchError, LoadError, refuse
from dtorch.protocol.values import dtype_from, dtype_name, encode_placement

Path = tuple[Any, ...]
"""Keys and indices that lead to a value."""


_DEEPEST = 100
_MOST_BITS = 4096  # Python refuses to write much longer numbers as text


@dataclass
class Weights:
    """Tensors that go into files of their own.

    Attributes:
        folder, stem: of the files.
        tensors: by name.
        nodes: what the tree says of each; the file is filled in later.
        module: whose weights they are.
    """

    folder: str
    stem: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    module: torch.nn.Module | None = None

    def add(self, name: str, t: torch.Tensor, node: dict[str, Any]) -> None:
        """Take a tensor, under this name or one like it."""
        wanted, count = name, 1
        while name in self.tensors:
            count += 1
            name = f"{wanted}#{count}"
        node["name"] = name
        self.tensors[name], self.nodes[name] = t, node


class Encoder:
    """Takes states apart.

    Attributes:
        weights: the tensors found: those that belong to no module first.
    """

    def __init__(self) -> None:
        self.weights = [Weights("", "state")]
        self._faults: list[str] = []

    def encode(self, state: Any) -> Any:
        """The tree of a state.

        Raises:
            DtorchError: values that cannot be saved; all of them.
        """
        tree = self._encode(state, (), self.weights[0], 0)
        refuse(self._faults, DtorchError)
        return tree

    def _encode(self, value: Any, path: Path, into: Weights, start: int) -> Any:
        """The node of a value; names of its tensors are the path from ``start`` on."""
        kind = type(value)
        if len(path) > _DEEPEST:
            where = "".join(f"[{key!r}]" for key in path[:3])
            self._faults.append(f"state{where}... has more than {_DEEPEST} levels, or contains itself.")
            return None
        if value is None or kind in (bool, str) or (kind is float and math.isfinite(value)):
            return value
        if kind is int and value.bit_length() <= _MOST_BITS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, into, start)
        if isinstance(value, torch.Generator):
            ours = random.is_ours(value)
            state = random.state_tensor(value._stream) if ours else value.get_state()  # type: ignore[attr-defined]
            return {"$": "generator", "of": self._tensor(state, path, into, start)}
        if isinstance(value, torch.nn.Module):
            return self._module(value, path)
        if not isinstance(value, type) and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            return {"$": "object", "of": self._encode(value.state_dict(), path, into, start)}
        if isinstance(value, Mapping):
            return self._mapping(value, path, into, start)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [self._encode(v, (*path, i), into, start) for i, v in enumerate(value)]
            name = "size" if kind is torch.Size else "tuple" if isinstance(value, tuple) else kind.__name__
            return items if kind is list else {"$": name, "of": items}
        return self._scalar(value, path, into, start)

    def _mapping(self, value: Mapping[Any, Any], path: Path, into: Weights, start: int) -> Any:
        items = [(k, self._encode(v, (*path, k), into, start)) for k, v in value.items()]
        if all(type(k) is str for k, _ in items) and "$" not in value:
            return dict(items)
        return {"$": "dict", "of": [[self._encode(k, (*path, k), into, start), v] for k, v in items]}

    def _module(self, module: torch.nn.Module, path: Path) -> Any:
        """A module's weights, in files that its library reads."""
        stem = "diffusion_pytorch_model" if hasattr(module, "save_config") else "model"
        folder = "/".join(_plain(str(key)) for key in path)
        while any(folder == other.folder for other in self.weights[1:]):
            folder += "_"
        mine = Weights(folder, stem, module=module)
        self.weights.append(mine)
        state = module.state_dict()
        metadata = self._encode(getattr(state, "_metadata", None), path, mine, len(path))
        return {"$": "object", "of": self._encode(state, path, mine, len(path)), "metadata": metadata}

    def _scalar(self, value: Any, path: Path, into: Weights, start: int) -> Any:
        numpy = sys.modules.get("numpy")
        if type(value) is float:
            return {"$": "float", "of": repr(value)}
        if type(value) is complex:
            return {"$": "complex", "of": [repr(value.real), repr(value.imag)]}
        if isinstance(value, (bytes, bytearray)):
            return {"$": "bytes", "of": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$": "dtype", "of": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"$": "device", "of": str(value)}
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biufc":
            node = self._tensor(torch.from_numpy(numpy.array(value, order="C")), path, into, start)
            return {"$": "array" if isinstance(value, numpy.ndarray) else "number", "of": node}
        where = "".join(f"[{key!r}]" for key in path)
        self._faults.append(
            f"state{where} is of type {type(value).__name__}, which cannot be saved: a state holds tensors, numbers, text, "
            "None, containers of these, and objects with state_dict() and load_state_dict()."
        )
        return None

    def _tensor(self, t: torch.Tensor, path: Path, into: Weights, start: int) -> Any:
        if t.layout != torch.strided or t.is_quantized or t.is_nested or t.is_meta:
            where = "".join(f"[{key!r}]" for key in path)
            self._faults.append(f"state{where} is a {_form(t)} tensor, which cannot be saved.")
            return None
        node: dict[str, Any] = {"$": "tensor"}
        t = t.detach()
        if t.dtype == torch.complex128:  # which the files do not have
            t, node["complex"] = torch.view_as_real(t.resolve_conj()), True
        if isinstance(t, DTensor):
            refresh(t)
            t = whole = reduced(t)
            spec = whole._h.spec
            node["mesh"] = {"shape": list(spec.mesh.shape), "placements": [encode_placement(p) for p in spec.placements]}
        else:
            t = t.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous()  # its value now
        into.add(".".join(map(str, path[start:])) or "value", t, node)
        return node


Fetch = Callable[[dict[str, Any], Path], torch.Tensor]
"""The tensor of a node at a path."""


def decode(node: Any, fetch: Fetch, path: Path = ()) -> Any:
    """The value of a node, with plain state dicts for objects.

    Raises:
        LoadError: it is no node.
    """
    if isinstance(node, list):
        return [decode(item, fetch, (*path, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {k: decode(v, fetch, (*path, k)) for k, v in node.items()}
    kind, of = node["$"], node.get("of")
    if kind == "tensor":
        t = fetch(node, path)
        return torch.view_as_complex(t) if node.get("complex") else t
    if kind in ("object", "generator"):
        return decode(of, fetch, path)
    if kind == "dict":
        return {k: decode(v, fetch, (*path, k)) for k, v in children(node).items()}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decode(of, fetch, path))
    if kind in ("array", "number"):
        array = decode(of, fetch, path).numpy()
        return array if kind == "array" else array[()]
    if kind in _SCALARS:
        return _SCALARS[kind](of)
    raise LoadError(f"the checkpoint holds a value of an unknown kind, {kind!r}.")


_SEQUENCES: dict[Any, Callable[[Any], Any]] = {"tuple": tuple, "size": torch.Size, "set": set, "frozenset": frozenset}
_SCALARS: dict[Any, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda of: complex(*map(float, of)),
    "bytes": base64.b64decode,
    "dtype": dtype_from,
    "device": torch.device,
    "value": lambda of: of,
}


def children(node: Any) -> dict[Any, Any]:
    """What lies below a dict or sequence, by key or index; nothing below anything else."""
    kind = node.get("$") if isinstance(node, dict) else None
    if kind == "dict":
        return {decode(k, _no_tensor): v for k, v in node["of"]}
    if isinstance(node, dict) and kind is None:
        return node
    items = node["of"] if kind in _SEQUENCES else node
    return dict(enumerate(items)) if isinstance(items, list) else {}


def _no_tensor(node: dict[str, Any], path: Path) -> torch.Tensor:
    raise LoadError("a key of a dict in the checkpoint is a tensor.")


def _plain(name: str) -> str:
    """A key as the name of a folder."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
    return name if name.strip(".") else f"_{name}"


def _form(t: torch.Tensor) -> str:
    kinds: Iterator[str] = (
        name
        for name, is_so in (("meta", t.is_meta), ("nested", t.is_nested), ("quantized", t.is_quantized))
        if is_so
    )
    return next(kinds, str(t.layout).removeprefix("torch."))
