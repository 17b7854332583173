"""``torch.save``, ``torch.load`` and pickle: the global value travels, placements are kept.

The pickle names one function of dtorch, ``rebuild``, which is declared safe for ``torch.load(weights_only=True)``: it
makes a tensor from plain values and can do nothing else. ``map_location`` decides as for other devices: a plain device
gives plain tensors, ``dtorch:k`` that mesh; files of plain tensors load onto a mesh by way of a ``HostStorage``.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.client import factories, graph
from dtorch.client.wrap import _Class, put, to_host
from dtorch.core.mesh import DeviceMesh
from dtorch.core.placements import Placement
from dtorch.core.torch_private import load_location
from dtorch.protocol.values import decode_placement, encode_placement


def reduce_tensor(t: Any) -> tuple[Any, ...]:
    """The reduction of ``t`` for pickle."""
    mesh: DeviceMesh = t.device_mesh
    names = list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
    where = [encode_placement(p) for p in t.placements]
    is_parameter = isinstance(t, torch.nn.Parameter)
    value = t.detach().to_torch()
    return rebuild, (value, mesh.device_type, mesh.mesh.tolist(), names, where, t.requires_grad, is_parameter)


def rebuild(
    value: torch.Tensor,
    device_type: str,
    devices: list[Any],
    names: list[str] | None,
    placements: list[Any],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    """A distributed tensor with the value, on the mesh of these devices or where ``torch.load`` maps it."""
    where: list[Placement] | None = [decode_placement(p) for p in placements]
    target = load_location(device_type)
    if target is None or target.type == "dtorch":
        mesh = DeviceMesh(device_type, devices, mesh_dim_names=names)
        if target is not None:
            mapped = graph.current_session().mesh(factories.resolve_mesh(target)[1].id)
            mesh, where = mapped, where if mapped.ndim == mesh.ndim else None
        session, layout, chosen = factories.placed(mesh, where, value.dim())
        out = to_host(value) if isinstance(value, _Class.tensor) else value.detach()
        out = put(session, out, layout, chosen)
    else:
        out = value.detach().to(target)
    if is_parameter:
        return torch.nn.Parameter(out, requires_grad)
    return out.requires_grad_(requires_grad)


class HostStorage(torch.UntypedStorage):
    """Bytes that ``torch.load`` has read for ``dtorch:k``; the tensors made from it share one distributed tensor."""

    _where: torch.device
    _host: torch.UntypedStorage
    _flat: dict[torch.dtype, Any]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where its tensors are to live."""
        return self._where

    def data_ptr(self) -> int:
        """Where the bytes are in this process; torch shares a storage among tensors only when it has some."""
        return self._host.data_ptr()


def restore(storage: torch.UntypedStorage, location: str) -> HostStorage | None:
    """The storage for a location of dtorch, ``None`` for others; called by ``torch.load``."""
    if not location.startswith("dtorch"):
        return None
    found = torch.UntypedStorage.__new__(HostStorage)
    found._where, found._host, found._flat = torch.device(location), storage, {}
    return found


def flat_tensor(storage: Any, dtype: torch.dtype) -> Any:
    """The distributed tensor of one dimension with all elements of a storage.

    Raises:
        RuntimeError: the storage is not one that ``torch.load`` has made for dtorch.
    """
    if not isinstance(storage, HostStorage):
        raise RuntimeError("set_ of a distributed tensor needs a distributed source; use copy_ for a plain tensor.")
    flat = storage._flat.get(dtype)
    if flat is None:
        session, mesh = factories.resolve_mesh(storage.device)
        plain = torch.empty(0, dtype=dtype).set_(storage._host)
        flat = storage._flat[dtype] = put(session, plain, mesh)
    return flat
