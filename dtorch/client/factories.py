"""Tensors made on the devices: dtorch's own factories, and torch's with ``device="dtorch"``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from dtorch.client import graph, random
from dtorch.client.lower import Ready, encode_plan, mark
from dtorch.client.session import Session
from dtorch.client.sites import caller
from dtorch.client.wrap import _Class, put, small_enough, wrap
from dtorch.core.errors import PlacementError, refuse
from dtorch.core.mesh import DeviceMesh, current_mesh, first_mesh
from dtorch.core.placements import REPLICATE, Placement, normalize
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.planner.call import Call
from dtorch.planner.meta import predict
from dtorch.planner.plan import Plan, Result

aten = torch.ops.aten
_FILLS = frozenset({"aten::empty", "aten::zeros", "aten::ones", "aten::full"})
_UNKNOWN = frozenset({"aten::empty", "aten::empty_strided"})


def resolve_mesh(device: Any) -> tuple[Session, MeshLayout]:
    """Session and mesh of a ``dtorch`` device; without an index the default mesh."""
    index = None if device is None else torch.device(device).index
    mesh = current_mesh() if index is None else None
    if mesh is not None:
        session = graph.session_of(mesh)
        return session, session.layout(mesh)
    session, index = graph.current_session(), index or 0
    if index == 0 and session.mesh_count == 0:
        return session, session.layout(first_mesh() or DeviceMesh(session.config.device_type, [0]))
    return session, session.layout(session.mesh(index))


def create(
    session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: MeshLayout,
    placements: tuple[Placement, ...],
) -> Any:  # fmt: skip
    """Run a factory operator on the workers; every device makes its own part."""
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "layout", "pin_memory") and v is not None}
    held = tuple(REPLICATE if p.is_partial() else p for p in placements)
    generator = kwargs.pop("generator", None)
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    if generator is not None and not random.is_ours(generator):
        return put(session, func(*args, **kwargs, generator=generator, device="cpu"), mesh, placements)
    if _few(func._schema.name, args):
        with torch.no_grad():
            return put(session, func(*args, **kwargs, device="cpu"), mesh, placements)
    fill = func._schema.name == "aten::full" and type(args[1]) in (int, float)
    static: tuple[Any, ...] = (args[0], type(args[1])) if fill else args
    key = (func, mesh, held, torch.get_default_dtype(), repr(static), repr(kwargs))
    ready = session.plans.get(key)
    if ready is None:
        ready = session.plans[key] = _plan(session, func, args, kwargs, mesh, held, is_random, fill)
    new = session.ids()
    operands: list[Any] = [args[1]] if fill else []
    if is_random:
        operands.append(random.generator_number(session, generator, mesh))
    session.sites.append(caller(sys._getframe(1)))
    session.buf.extend((ready.code, *operands, new))
    session.emitted()
    assert ready.spec is not None
    out = wrap(session, new, ready.spec)
    name, spec = func._schema.name, ready.spec
    if not is_random and name not in _UNKNOWN and small_enough(spec.shape, spec.dtype, name in _FILLS):
        with torch.inference_mode(False), torch.no_grad():
            out._h.shadow = func(*args, **kwargs, device="cpu")
    if held != placements:
        out = out.redistribute(placements=list(placements))
    return out


def _few(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a factory, whose values are its arguments', makes so few elements that sending them beats a plan."""
    if name == "aten::arange":
        start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
        return bool(step) and abs(end - start) <= _FEW * abs(step)
    return name == "aten::scalar_tensor" or (name in ("aten::linspace", "aten::logspace") and args[2] <= _FEW)


_FEW = 1024


def _plan(
    session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: MeshLayout,
    placements: tuple[Placement, ...], is_random: bool, fill: bool,
) -> Ready:  # fmt: skip
    if any(a.name == "generator" for a in func._schema.arguments):
        kwargs = {**kwargs, "generator": None}  # some overloads insist on one, be it None; the command names it
    call = Call(func, args, {**kwargs, "device": torch.device("dtorch", mesh.id)})
    value, _ = predict(call)
    spec = TensorSpec(mesh, placements, tuple(value.shape), tuple(value.stride()), value.dtype)
    name = func._schema.name
    sharded = not spec.is_replicated
    resize, kernel = None, None
    if sharded and name == "aten::empty_strided":
        kernel = "empty_piece"
    elif sharded and name in _FILLS:
        resize = ("size", 0)
    elif sharded and not is_random:
        kernel = "cut"
    plan = Plan(call, mesh, (), (), (), (), (Result(spec),), 0, kernel, resize, False, is_random)
    marked, marked_kwargs, numbers = mark(call, frozenset(), frozenset({1}) if fill else frozenset())
    if is_random and not any(a.name == "generator" for a in func._schema.arguments):
        marked_kwargs.pop("generator", None)
    code = session.send_plan(encode_plan(session, plan, marked, marked_kwargs, numbers + is_random))
    return Ready(session, plan, code, _Class.tensor, None)


def kernel(func: Any) -> Any:
    """A PrivateUse1 kernel: the factory on the mesh of its ``device``, replicated unless a factory of dtorch asks."""
    names = [a.name for a in func._schema.arguments]
    n = sum(1 for a in func._schema.arguments if not a.kwarg_only)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        asked, placements = _asked.get(), None
        if asked is not None:
            session, mesh, placements = asked
        else:
            session, mesh = resolve_mesh(given.get("device"))
        ndim = len(given["size"]) if "size" in given else _NDIM.get(func._schema.name, 1)
        positional = tuple(given.pop(x) for x in names[:n] if x in given)
        return create(session, func, positional, given, mesh, normalize(placements, mesh.ndim, ndim))

    return run


# What a factory of ``dtorch`` asks of the kernel below it: where to make the tensor.
_asked: ContextVar[tuple[Session, MeshLayout, Any] | None] = ContextVar("dtorch_factory", default=None)
_NDIM = {"aten::eye": 2, "aten::tril_indices": 2, "aten::triu_indices": 2, "aten::scalar_tensor": 0}


# Overloads that reach a device's own kernel; all others of torch's factories decompose onto them.
KERNELS = (
    aten.empty.memory_format, aten.empty_strided.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
    aten.full.default, aten.zeros.default, aten.ones.default, aten.rand.default, aten.rand.generator, aten.randn.default,
    aten.randn.generator, aten.randint.default, aten.randint.low, aten.randint.generator, aten.randint.low_generator,
    aten.randperm.default, aten.randperm.generator, aten.linspace.default, aten.logspace.default, aten.eye.default,
    aten.eye.m, aten.tril_indices.default, aten.triu_indices.default, aten.scalar_tensor.default,
)  # fmt: skip


def is_plain(device_mesh: Any, placements: Any, device: Any) -> bool:
    """Whether a factory was asked for a plain tensor: a device of torch's, and no word about placement.

    Raises:
        PlacementError: ``device=`` together with what contradicts it.
    """
    if device is None:
        return False
    faults = []
    plain = torch.device(device).type != "dtorch"
    if device_mesh is not None:
        faults.append("Give device= or device_mesh=, not both: the mesh already says which devices.")
    if plain and placements is not None:
        faults.append(f"device={str(device)!r} makes a plain tensor, which has no placements: leave out one of the two.")
    refuse(faults)
    return plain


def locate(device_mesh: Any, device: Any) -> tuple[Session, MeshLayout]:
    """Session and mesh for a factory: of ``device_mesh``, else of ``device``, else the default mesh.

    Raises:
        PlacementError: ``device_mesh`` is none.
    """
    if device_mesh is None:
        return resolve_mesh(device)
    if not isinstance(device_mesh, DeviceMesh):
        raise PlacementError(f"device_mesh={device_mesh!r} is not a dtorch.DeviceMesh.")
    session = graph.session_of(device_mesh)
    return session, session.layout(device_mesh)


def placed(
    device_mesh: Any, placements: Sequence[Any] | None, ndim: int
) -> tuple[Session, MeshLayout, tuple[Placement, ...]]:
    """Where a tensor of ``ndim`` dimensions goes.

    Raises:
        PlacementError: no mesh, or placements that do not fit.
    """
    session, layout = locate(device_mesh, None)
    return session, layout, normalize(placements, layout.ndim, ndim)


def make(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], device_mesh: Any,
    placements: Sequence[Any] | None, device: Any,
) -> Any:  # fmt: skip
    """torch's factory on a mesh: torch reads the arguments, our kernel of the factory finds the placements."""
    if is_plain(device_mesh, placements, device):
        return func(*args, device=device, **kwargs)
    session, mesh = locate(device_mesh, device)
    if isinstance(placements, Iterable):
        placements = list(placements)
    token = _asked.set((session, mesh, placements))
    try:
        return func(*args, device=torch.device("dtorch", mesh.id), **kwargs)
    finally:
        _asked.reset(token)


def make_like(
    func: Callable[..., Any], other: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], device_mesh: Any,
    placements: Sequence[Any] | None, device: Any,
) -> Any:  # fmt: skip
    """torch's ``*_like`` of a tensor, placed like it, or otherwise when asked."""
    if is_plain(device_mesh, placements, device):
        return func(other, *args, device=device, **kwargs)
    ours = isinstance(other, _Class.tensor)
    if ours and device_mesh is None and placements is None:
        return func(other, *args, **kwargs) if device is None else func(other, *args, device=device, **kwargs)
    session, mesh = locate(other.device_mesh if ours and device_mesh is device is None else device_mesh, device)  # type: ignore[attr-defined]
    where = normalize(placements, mesh.ndim, other.dim())
    held = tuple(REPLICATE if p.is_partial() else p for p in where)
    form = {k: kwargs[k] for k in ("dtype", "memory_format") if k in kwargs}
    with torch.no_grad():
        model = torch.empty_like(other.detach(), device="meta", **form)
        size = (list(model.shape), list(model.stride()))
        base = create(session, aten.empty_strided.default, size, {"dtype": model.dtype}, mesh, held)
    out = func(base, *args, **kwargs)
    return out if held == where else out.redistribute(placements=list(where))
