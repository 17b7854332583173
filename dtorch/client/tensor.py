"""``DTensor``: a ``torch.Tensor`` that knows mesh and placements and holds no data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtorch.client import aliasing, graph, norms, specials, statistics, wrap
from dtorch.client.dispatch import dispatch
from dtorch.client.factories import placed
from dtorch.client.future import TensorFuture
from dtorch.client.handle import Handle
from dtorch.core.errors import PlacementError, refuse
from dtorch.core.mesh import DeviceMesh
from dtorch.core.pieces import slices
from dtorch.core.placements import REPLICATE, Placement, normalize
from dtorch.core.torch_private import disabled_torch_function, make_wrapper_subclass

_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DTensor(torch.Tensor):
    """A distributed tensor.

    Args:
        data: a plain tensor, a distributed one, or data for ``torch.tensor``.
        device_mesh: where it lives; by default the default mesh.
        placements: one per mesh axis; by default replicated.
        requires_grad: whether autograd records operations on it.
    """

    _h: Handle
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        data: Any,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        requires_grad: bool | None = None,
        **attributes: Any,
    ) -> Any:
        if args and isinstance(args[0], bool):
            requires_grad = args[0]
        if attributes or (
            isinstance(data, torch.Tensor) and device_mesh is None and placements is None and requires_grad is not None
        ):
            return _as_parameter(data, bool(requires_grad), attributes)
        return distribute_tensor(data, device_mesh, placements, requires_grad=bool(requires_grad))

    __torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]

    # -- where it is ------------------------------------------------------------------------------------------------
    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lives on."""
        return self._h.session.mesh(self._h.spec.mesh.id)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How each mesh axis treats it."""
        return self._h.spec.placements

    # -- to the host ------------------------------------------------------------------------------------------------
    def to_torch(self) -> torch.Tensor:
        """The global value as a plain CPU tensor, outside of autograd; waits."""
        return wrap.to_host(self)

    def full_tensor(self) -> torch.Tensor:
        """The global value as a plain CPU tensor, differentiable."""
        return _ToHost.apply(self) if self.requires_grad else self.to_torch()  # type: ignore[no-untyped-call]

    def to_torch_async(self) -> TensorFuture:
        """The value as of now, without waiting for it."""
        aliasing.refresh(self)
        return TensorFuture(self)

    def to_local(self, device: int | str | torch.device | None = None) -> torch.Tensor:
        """The piece held by one device of the mesh, as a plain CPU tensor; differentiable; waits.

        Args:
            device: device number, or ``"cpu:1"``; by default the mesh's first.

        Raises:
            PlacementError: the mesh has no such device; or autograd is asked for the term of a Partial tensor.
        """
        position = self._position(device)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return wrap.piece(self, position)
        if self._h.spec.has_partial:
            raise PlacementError(
                f"to_local of a tensor placed {list(self.placements)} that requires grad: the term of one device has no "
                "gradient of its own. Call redistribute() or detach() first."
            )
        return _ToLocal.apply(self, position)  # type: ignore[no-any-return, no-untyped-call]

    def _position(self, device: int | str | torch.device | None) -> int:
        """Position in the mesh of a device given by number or name; of the first one without a number."""
        mesh = self.device_mesh
        named = None if device is None or isinstance(device, int) else torch.device(device)
        number = device if named is None else named.index
        if (named is not None and named.type != mesh.device_type) or (number is not None and number not in mesh.devices):
            raise PlacementError(f"Device {str(device)!r} is not in {mesh}: its devices are {list(mesh.devices)}.")
        return 0 if number is None else mesh.devices.index(number)

    def numpy(self, *, force: bool = False) -> Any:
        """The value as a numpy array.

        Raises:
            RuntimeError: the tensor requires grad and ``force`` is not set, as in torch.
        """
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.to_torch().resolve_conj().resolve_neg().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        value = self.numpy()
        return value if dtype is None else value.astype(dtype)

    def tolist(self) -> Any:
        """The value as nested lists."""
        return self.to_torch().tolist()

    # -- to other placements ----------------------------------------------------------------------------------------
    def redistribute(self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None) -> DTensor:
        """The same value placed otherwise, on this or another mesh; differentiable.

        Raises:
            PlacementError: placements that do not fit the mesh or the tensor.
        """
        session = self._h.session
        mesh = self._h.spec.mesh if device_mesh is None else session.layout(device_mesh)
        if placements is None:
            if mesh.ndim != self._h.spec.mesh.ndim:
                raise PlacementError(
                    f"redistribute to {device_mesh}, which has {mesh.ndim} axes instead of {self._h.spec.mesh.ndim}: "
                    "say how with placements=."
                )
            placements = self._h.spec.placements
        return _Redistribute.apply(self, mesh, normalize(placements, mesh.ndim, self.dim()))  # type: ignore[no-any-return, no-untyped-call]

    def redistribute_like(self, other: DTensor) -> DTensor:
        """Placed as ``other`` is."""
        return self.redistribute(other.device_mesh, other.placements)

    def redistribute_by_dict(
        self, placements_dict: dict[str, Any], default_placement_mode: str = "raise_error"
    ) -> DTensor:
        """Placed by axis name.

        Args:
            placements_dict: mesh axis name -> placement.
            default_placement_mode: for axes without an entry: ``"raise_error"``, ``"replicate"`` or ``"keep"``.

        Raises:
            PlacementError: an unknown axis or mode, or a missing entry.
        """
        mesh, chosen, faults = self.device_mesh, {}, []
        if default_placement_mode not in ("raise_error", "replicate", "keep"):
            faults.append(
                f"default_placement_mode={default_placement_mode!r}: use 'raise_error', 'replicate' or 'keep'."
            )
        for name, p in placements_dict.items():
            try:
                chosen[mesh.axis(name)] = p
            except PlacementError as e:
                faults.append(str(e))
        names: Sequence[Any] = mesh.mesh_dim_names or range(mesh.ndim)
        missing = [names[a] for a in range(mesh.ndim) if a not in chosen]
        if missing and default_placement_mode == "raise_error":
            faults.append(f"No placement is given for mesh axes {missing} of {mesh}.")
        refuse(faults)
        default = [REPLICATE] * mesh.ndim if default_placement_mode == "replicate" else list(self.placements)
        return self.redistribute(placements=[chosen.get(a, default[a]) for a in range(mesh.ndim)])

    # -- torch's surface where a wrapper must answer itself ---------------------------------------------------------
    @property
    def data(self) -> DTensor:
        """The tensor outside of autograd."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, DTensor):
            raise RuntimeError("Setting .data of a distributed tensor needs a distributed tensor; use copy_ instead.")
        _set_data(self, value)
        self._h = value._h

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe(self)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        with torch.no_grad(), torch.inference_mode(False):
            copied = _copied(self, memo)
        out: Any = (
            torch.nn.Parameter(copied, self.requires_grad)
            if isinstance(self, torch.nn.Parameter)
            else copied.requires_grad_(self.requires_grad)
        )
        out.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("_h", "_is_param")})
        if self.grad is not None:
            out.grad = self.grad.__deepcopy__(memo)
        memo[id(self)] = out
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        from dtorch.client.saving import reduce_tensor

        return reduce_tensor(self)

    def data_ptr(self) -> int:
        """A number that tells tensors with different memory apart; no address."""
        return _address(self) + int(self.storage_offset()) * self.element_size()

    def untyped_storage(self) -> Any:
        """Stands for the memory on the workers: tells shared tensors apart and knows its size."""
        return StorageStandIn(self)

    def storage(self) -> Any:
        """As ``untyped_storage``."""
        return self.untyped_storage()

    def share_memory_(self) -> DTensor:
        """The memory is on the workers already."""
        return self

    def is_shared(self) -> bool:
        """Workers share it with whoever holds the wrapper."""
        return True

    def pin_memory(self, device: Any = None) -> DTensor:
        """Nothing to pin."""
        return self

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise BufferError("A distributed tensor has no memory in this process to share; use .to_torch() first.")

    def dtorch(self, index: int | None = None) -> Any:
        """On the mesh ``dtorch:index``."""
        return self.to("dtorch" if index is None else f"dtorch:{index}")


def _copied(t: DTensor, memo: dict[Any, Any]) -> torch.Tensor:
    """A copy; those of whole tensors that share memory share the copy of all of it."""
    h = t._h
    if wrap.is_alone(h) or h.view is not None or not h.spec.is_replicated:
        return t.detach().clone()
    family = h.family
    root = None if family is None else family.root()
    if family is None or root is None or not root.spec.is_contiguous:
        return t.detach().clone()
    key = "memory", id(family)
    if key not in memo:
        everything = t.detach().as_strided((family.nbytes // t.element_size(),), (1,), 0)
        memo[key] = family, everything.clone()
    flat = memo[key][1]
    return flat.view(t.dtype).as_strided(t.shape, t.stride(), t.storage_offset())  # type: ignore[no-any-return]


wrap._Class.tensor = DTensor


class StorageStandIn:
    """What save_pretrained and safetensors ask of a storage."""

    def __init__(self, t: DTensor) -> None:
        self._t = t

    def data_ptr(self) -> int:
        """The same for tensors that share memory."""
        return _address(self._t)

    def nbytes(self) -> int:
        """Size of the memory: that of the tensor that all others in it are views of."""
        t, family = self._t, self._t._h.family
        shared = 0 if family is None else family.nbytes
        if t.numel() == 0:
            return shared
        last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        return max(shared, int(last + 1) * t.element_size())

    size = nbytes

    def __len__(self) -> int:
        return self.nbytes()

    @property
    def device(self) -> torch.device:
        """The tensor's device."""
        return self._t.device

    @property
    def _cdata(self) -> int:
        return _address(self._t)


def _address(t: DTensor) -> int:
    """A number for the tensor's memory, shared by its views; numbers of two tensors lie farther apart than their sizes."""
    h = t._h
    return h.session.number << 104 | (h.id if h.family is None else h.family.number) << 40


def _as_parameter(data: Any, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    """``type(param)(data, requires_grad=...)`` as accelerate and transformers call it."""
    if not isinstance(data, DTensor):
        return torch.nn.Parameter(data, requires_grad)
    out: Any = torch.nn.Parameter(data.detach(), requires_grad)
    out.__dict__.update(attributes)
    return out


def distribute_tensor(
    data: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Any] | None = None,
    *,
    requires_grad: bool = False,
) -> DTensor:
    """A distributed tensor with the value of ``data``.

    Args:
        data: a plain or distributed tensor, or anything ``torch.tensor`` takes.
        device_mesh: by default the default mesh.
        placements: one per mesh axis; by default replicated.

    Raises:
        PlacementError: placements that do not fit.
    """
    if isinstance(data, DTensor):
        out = data.redistribute(device_mesh, placements if placements is not None else None)
        if requires_grad and out.is_leaf:
            out.requires_grad_()
        return out
    plain = data if isinstance(data, torch.Tensor) else torch.tensor(data)
    session, mesh, where = placed(device_mesh, placements, plain.dim())
    if plain.requires_grad and torch.is_grad_enabled() and not requires_grad:
        return _FromHost.apply(plain, session, mesh, where)  # type: ignore[no-any-return, no-untyped-call]
    return wrap.put(session, plain, mesh, where).requires_grad_(requires_grad)  # type: ignore[no-any-return]


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, mesh: Any, placements: tuple[Placement, ...]) -> Any:
        aliasing.refresh(t)
        h = t._h
        ctx.back = h.spec
        target = wrap.moved_spec(h.session, h.spec, mesh, placements)
        if target is h.spec or (mesh is h.spec.mesh and placements == h.spec.placements):
            return wrap.alias(t) if h.view is None else t.view_as(t)
        return wrap.move(t, target)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        # The gradient of a value that was to be reduced is the whole gradient on every device.
        spec = ctx.back
        placements = tuple(REPLICATE if p.is_partial() else p for p in spec.placements)
        return grad.redistribute(grad._h.session.mesh(spec.mesh.id), placements), None, None


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor) -> Any:
        ctx.back, ctx.session = t._h.spec, t._h.session
        return t.to_torch()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _from_host(grad, ctx.session, ctx.back)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: DTensor, position: int) -> Any:
        ctx.back, ctx.session, ctx.position = t._h.spec, t._h.session, position
        return wrap.piece(t, position)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole = torch.zeros(ctx.back.shape, dtype=grad.dtype)
        for box, here in ctx.back.parts(ctx.position):
            around = zip(reversed(box), reversed(ctx.back.shape), strict=True)
            margins = [n for (a, b), size in around for n in (a, size - b)]
            whole = whole + torch.nn.functional.pad(grad[slices(here)], margins)
        return _from_host(whole, ctx.session, ctx.back), None


def _from_host(grad: torch.Tensor, session: Any, spec: Any) -> Any:
    """A gradient that comes from the host, placed as the tensor is (whole where that is Partial)."""
    placements = tuple(REPLICATE if p.is_partial() else p for p in spec.placements)
    return _FromHost.apply(grad, session, spec.mesh, placements)  # type: ignore[no-untyped-call]


class _FromHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, session: Any, mesh: Any, where: Any) -> Any:
        ctx.device = plain.device
        return wrap.put(session, plain, mesh, where)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return grad.full_tensor().to(ctx.device), None, None, None


def describe(t: DTensor) -> str:
    """Values of the global tensor, its mesh and placements."""
    body = repr(t.to_torch())
    inner = body[len("tensor(") : -1] if body.startswith("tensor(") else body
    extra = ""
    if t.grad_fn is not None:
        extra = f", grad_fn=<{type(t.grad_fn).__name__}>"
    elif t.requires_grad:
        extra = ", requires_grad=True"
    name = "Parameter" if isinstance(t, torch.nn.Parameter) else "DTensor"
    return f"{name}({inner}, device_mesh={t.device_mesh}, placements={list(t.placements)}{extra})"


__all__ = [
    "DTensor", "StorageStandIn", "describe", "distribute_tensor", "graph", "make_wrapper_subclass", "norms", "specials",
    "statistics",
]  # fmt: skip
