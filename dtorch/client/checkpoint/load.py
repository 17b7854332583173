"""``dtorch.load``: a checkpoint into what is there, however that is placed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from dtorch.client import random, wrap
from dtorch.client.checkpoint import dcp
from dtorch.client.checkpoint.directory import MANIFEST, find, read_manifest
from dtorch.client.checkpoint.pending import complete
from dtorch.client.checkpoint.tree import Path, children, decode
from dtorch.client.factories import locate
from dtorch.client.session import Session
from dtorch.client.sites import Site, caller
from dtorch.client.tensor import DTensor
from dtorch.client.weights import Stored, load_one, mapped, read_header
from dtorch.core.errors import LoadError, refuse
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import REPLICATE, Placement
from dtorch.core.spec import MeshLayout
from dtorch.protocol.values import decode_placement

Place = tuple[Session, MeshLayout, tuple[Placement, ...]]
Like = Callable[[Path], "tuple[Any, bool]"]
"""What the tensor at a path is to be placed like, and whether that is its very place or merely what it belongs to."""


def load(directory: str | os.PathLike[str], into: Any = None, *, device_mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Read a checkpoint of ``dtorch.save``, or of ``torch.distributed.checkpoint``; does not wait for workers,
    but for a save to this directory.

    Every tensor is placed as it is in ``into``, whatever placement it was saved from; each worker reads its own part. The
    states of an optimizer that has none yet are placed as its parameters.

    Args:
        directory: of the checkpoint.
        into: what was saved, or a part of it: dicts and lists of tensors, which are overwritten, of objects, whose
            ``load_state_dict`` is called, and of other values, which are replaced. ``None``: new tensors.
        device_mesh: for tensors on meshes that ``into`` says nothing of; by default the default mesh. They get the
            placements that they were saved from if the mesh has the same shape, else they are replicated.
        options: of ``torch.load``, which reads what is not a directory.

    Returns:
        ``into``; or, without, the state, with state dicts in the place of objects.

    Raises:
        LoadError: there is no complete checkpoint, it is damaged, or it lacks what ``into`` has; nothing has been changed.
    """
    if hasattr(directory, "read") or os.path.isfile(directory):
        return torch.load(directory, **options)
    complete(directory)
    path = find(directory)
    source: _Source
    tree = read_manifest(path)["state"] if os.path.isfile(os.path.join(path, MANIFEST)) else None
    if os.path.isfile(os.path.join(path, ".metadata")):
        source, tree = _Host(device_mesh), dcp.read(path, tree)
    else:
        source = _Files(path, device_mesh, caller(sys._getframe(1)))
    if into is not None:
        faults: list[str] = []
        _check(tree, into, (), source, faults)
        refuse([f"{directory}: {fault}" for fault in faults], LoadError)
    with torch.no_grad():
        return _restore(tree, into, (), source)


class _Source:
    """Where tensors come from.

    Args:
        device_mesh: see ``load``.
    """

    def __init__(self, device_mesh: DeviceMesh | None) -> None:
        self._device_mesh = device_mesh

    def shape(self, node: dict[str, Any]) -> tuple[int, ...]:
        """The shape of a tensor."""
        raise NotImplementedError

    def dtype(self, node: dict[str, Any]) -> torch.dtype:
        """The dtype of a tensor."""
        raise NotImplementedError

    def tensor(self, node: dict[str, Any], like: Any = None, exactly: bool = False) -> torch.Tensor:
        """A tensor, placed like another, or like one that it merely belongs to."""
        raise NotImplementedError

    def where(self, node: dict[str, Any], like: Any, exactly: bool) -> Place | None:
        """Where a tensor is to be: ``None`` for a plain one."""
        saved = node.get("mesh")
        if not isinstance(like, DTensor):
            if like is not None or saved is None:
                return None
            session, layout = locate(self._device_mesh, None)
            return session, layout, _as_saved(saved, layout)
        spec, shape = like._h.spec, self.shape(node)
        if shape == spec.shape and (exactly or shape):  # a number says nothing about its place
            return like._h.session, spec.mesh, tuple(REPLICATE if p.is_partial() else p for p in spec.placements)
        if saved is None and not exactly:
            return None
        return like._h.session, spec.mesh, _as_saved(saved, spec.mesh)


class _Files(_Source):
    """Safetensors files in a directory."""

    def __init__(self, directory: str, device_mesh: DeviceMesh | None, site: Site) -> None:
        super().__init__(device_mesh)
        self._directory, self._site = directory, site
        self._headers: dict[str, dict[str, Stored]] = {}

    def _stored(self, node: dict[str, Any]) -> Stored:
        file, name = node["file"], node["name"]
        if file not in self._headers:
            self._headers[file] = read_header(os.path.join(self._directory, file))
        if name not in self._headers[file]:
            raise LoadError(f"{os.path.join(self._directory, file)} has no tensor {name!r}, which {MANIFEST} names.")
        return self._headers[file][name]

    def shape(self, node: dict[str, Any]) -> tuple[int, ...]:
        return self._stored(node).shape

    def dtype(self, node: dict[str, Any]) -> torch.dtype:
        return self._stored(node).dtype

    def tensor(self, node: dict[str, Any], like: Any = None, exactly: bool = False) -> torch.Tensor:
        stored, place = self._stored(node), self.where(node, like, exactly)
        if place is None:
            return mapped(stored).clone()
        found: torch.Tensor = load_one(*place, stored, node["name"], stored.dtype, self._site)
        return found


class _Host(_Source):
    """Tensors that this process has read."""

    def shape(self, node: dict[str, Any]) -> tuple[int, ...]:
        return tuple(node["value"].shape)

    def dtype(self, node: dict[str, Any]) -> torch.dtype:
        dtype: torch.dtype = node["value"].dtype
        return dtype

    def tensor(self, node: dict[str, Any], like: Any = None, exactly: bool = False) -> torch.Tensor:
        place, value = self.where(node, like, exactly), node["value"]
        found: torch.Tensor = value if place is None else wrap.put(place[0], value, *place[1:])
        return found


def _as_saved(saved: dict[str, Any] | None, mesh: MeshLayout) -> tuple[Placement, ...]:
    """The placements that a tensor was saved from, on a mesh of the same shape; else replicated."""
    if saved is None or tuple(saved["shape"]) != mesh.shape:
        return (REPLICATE,) * mesh.ndim
    return tuple(map(decode_placement, saved["placements"]))


def _check(node: Any, target: Any, path: Path, source: _Source, faults: list[str]) -> None:
    """Note what a target has and the checkpoint lacks."""
    where = "state" + "".join(f"[{key!r}]" for key in path)
    kind = node.get("$") if isinstance(node, dict) else None
    if hasattr(target, "load_state_dict"):
        if kind not in (None, "object", "dict") or not isinstance(node, dict):
            faults.append(f"{where} is no state of a {type(target).__name__}.")
    elif isinstance(target, torch.Tensor):
        if kind != "tensor":
            faults.append(f"{where} is no tensor there.")
        elif not node.get("complex") and source.shape(node) != tuple(target.shape):
            faults.append(f"{where} has shape {source.shape(node)} there, and {tuple(target.shape)} here.")
        elif not node.get("complex") and not torch.can_cast(source.dtype(node), target.dtype):
            faults.append(f"{where} is of {source.dtype(node)} there, and of {target.dtype} here, which cannot hold it.")
        elif any(n > 1 and not step for n, step in zip(target.shape, target.stride(), strict=True)):
            faults.append(f"{where} is expanded here: several of its elements are one, so nothing can be loaded into it.")
    elif isinstance(target, torch.Generator):
        if kind != "generator":
            faults.append(f"{where} is no generator's state there.")
    elif isinstance(target, (dict, list, tuple)):
        below = children(node)
        for key, value in target.items() if isinstance(target, dict) else enumerate(target):
            if key in below:
                _check(below[key], value, (*path, key), source, faults)
            else:
                faults.append(f"{where}[{key!r}] is missing there; it has {', '.join(map(repr, below)) or 'nothing'}.")
    elif isinstance(target, (bool, int, float, str)) and (kind in ("tensor", "object", "generator") or children(node)):
        what = {"tensor": "a tensor", "object": "an object", "generator": "a generator"}.get(str(kind), "a container")
        faults.append(f"{where} is {what} there, and {target!r} here.")


def _restore(node: Any, target: Any, path: Path, source: _Source) -> Any:
    """What a target becomes."""
    if hasattr(target, "load_state_dict"):
        _restore_object(node, target, source)
        return target
    if isinstance(target, torch.Tensor):
        target.detach().copy_(decode(node, lambda leaf, _: source.tensor(leaf, target, True)))
        return target
    if isinstance(target, torch.Generator):
        _set_generator(target, decode(node, lambda leaf, _: source.tensor(leaf)))
        return target
    if isinstance(target, (dict, list, tuple)):
        below = children(node)
        if isinstance(target, tuple):
            return tuple(_restore(below[i], value, (*path, i), source) for i, value in enumerate(target))
        for key in list(target) if isinstance(target, dict) else range(len(target)):
            target[key] = _restore(below[key], target[key], (*path, key), source)
        return target
    return decode(node, lambda leaf, _: source.tensor(leaf))


def _restore_object(node: dict[str, Any], target: Any, source: _Source) -> None:
    tree = node["of"] if node.get("$") == "object" else node
    like = _places(target, tree)
    state = decode(tree, lambda leaf, path: source.tensor(leaf, *like(path)))
    if node.get("metadata") is not None and isinstance(target, torch.nn.Module):
        state = _WithMetadata(state)
        state._metadata = decode(node["metadata"], lambda leaf, _: source.tensor(leaf))
    target.load_state_dict(state)


class _WithMetadata(dict[str, Any]):
    """A module's state dict, with the versions of its modules."""

    _metadata: Any


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    if random.is_ours(generator):
        random.set_state(generator._stream, state)  # type: ignore[attr-defined]
    else:
        generator.set_state(state.cpu())


def _places(target: Any, tree: Any) -> Like:
    """Where the tensors of an object's state go."""
    if hasattr(target, "param_groups") and hasattr(target, "state"):
        return _places_of_optimizer(target, tree)
    now = target.state_dict()

    def like(path: Path) -> tuple[Any, bool]:
        found = now
        for key in path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None, False
        return (found, True) if isinstance(found, torch.Tensor) else (None, False)

    return like


def _places_of_optimizer(optimizer: Any, tree: Any) -> Like:
    """As the states that it has, and else as the parameters: states are made at the first step."""
    groups = children(children(tree).get("param_groups"))
    saved = [key for group in groups.values() for key in children(children(group)["params"]).values()]
    own = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = dict(zip(saved, own, strict=False))  # load_state_dict says what does not fit

    def like(path: Path) -> tuple[Any, bool]:
        kind, key, *rest = path
        if kind == "param_groups":
            value = optimizer.param_groups[key].get(rest[0]) if key < len(optimizer.param_groups) else None
            return (value, True) if isinstance(value, torch.Tensor) else (None, False)
        p = parameters.get(key)
        if kind != "state" or p is None:
            return None, False
        value = optimizer.state.get(p, {}).get(rest[0])
        return (value, True) if isinstance(value, torch.Tensor) else (p, False)

    return like
