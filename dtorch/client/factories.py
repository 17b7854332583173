"""Tensors made on the devices: dtorch's own factories, and torch's with ``device="dtorch"``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from dtorch.client import graph, random
from dtorch.client.lower import Ready, encode_plan, mark
from dtorch.client.session import Session
from dtorch.client.sites import caller
from dtorch.client.wrap import _Class, put, small_enough, wrap
from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh, current_mesh
from dtorch.core.placements import REPLICATE, Placement, normalize
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.planner.call import Call
from dtorch.planner.meta import predict
from dtorch.planner.plan import Plan, Result

aten = torch.ops.aten
_FILLS = frozenset({"aten::empty", "aten::empty_strided", "aten::zeros", "aten::ones", "aten::full"})
_UNKNOWN = frozenset({"aten::empty", "aten::empty_strided"})


def resolve_mesh(device: Any) -> tuple[Session, MeshLayout]:
    """Session and mesh of a ``dtorch`` device; without an index the default mesh."""
    session = graph.current_session()
    index = None if device is None else torch.device(device).index
    if index is None:
        mesh = current_mesh()
        if mesh is not None:
            owner = mesh._graph if isinstance(mesh._graph, Session) else session
            return owner, owner.layout(mesh)
        index = 0
    if index == 0 and session.mesh_count == 0:
        return session, session.layout(DeviceMesh(session.config.device_type, [0]))
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
    kwargs.setdefault("dtype", None)
    takes_dtype = any(a.name == "dtype" for a in func._schema.arguments)
    if not takes_dtype:
        kwargs.pop("dtype")
    key = (func, mesh, held, torch.get_default_dtype(), repr(args), repr(kwargs))
    ready = session.plans.get(key)
    if ready is None:
        ready = session.plans[key] = _plan(session, func, args, kwargs, mesh, held, is_random)
    new = session.ids()
    operands: list[Any] = []
    if is_random:
        operands.append(random.generator_number(session, generator, mesh))
    session.sites.append(caller(sys._getframe(1)))
    session.buf.extend((ready.code, *operands, new))
    session.emitted()
    assert ready.spec is not None
    out = wrap(session, new, ready.spec)
    if not is_random and small_enough(ready.spec.shape, ready.spec.dtype) and func._schema.name not in _UNKNOWN:
        with torch.inference_mode(False), torch.no_grad():
            out._h.shadow = func(*args, **kwargs, device="cpu")
    if held != placements:
        out = out.redistribute(placements=list(placements))
    return out


def _plan(
    session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: MeshLayout,
    placements: tuple[Placement, ...], is_random: bool,
) -> Ready:  # fmt: skip
    call = Call(func, args, {**kwargs, "device": torch.device("dtorch", mesh.id)})
    value, _ = predict(call)
    spec = TensorSpec(mesh, placements, tuple(value.shape), tuple(value.stride()), value.dtype)
    name = func._schema.name
    sharded = not spec.is_replicated
    resize, kernel = None, None
    if sharded and name in _FILLS and name != "aten::empty_strided":
        resize = ("size", 0)
    elif sharded and not is_random:
        kernel = "cut"
    plan = Plan(call, mesh, (), (), (), (), (Result(spec),), 0, kernel, resize, False, is_random)
    marked, marked_kwargs, numbers = mark(call, frozenset(), frozenset())
    if is_random and not any(a.name == "generator" for a in func._schema.arguments):
        marked_kwargs.pop("generator", None)
    code = session.send_plan(encode_plan(session, plan, marked, marked_kwargs, numbers + is_random))
    return Ready(session, plan, code, _Class.tensor, None)


def kernel(func: Any) -> Any:
    """A PrivateUse1 kernel: the factory on the mesh of its ``device``, replicated."""
    names = [a.name for a in func._schema.arguments]

    def make(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        given.update(kwargs)
        session, mesh = resolve_mesh(given.get("device"))
        n = sum(1 for a in func._schema.arguments if not a.kwarg_only)
        positional = tuple(given.pop(x) for x in names[:n] if x in given)
        return create(session, func, positional, given, mesh, (REPLICATE,) * mesh.ndim)

    return make


# Overloads that reach a device's own kernel; all others of torch's factories decompose onto them.
KERNELS = (
    aten.empty.memory_format, aten.empty_strided.default, aten.arange.default, aten.arange.start, aten.arange.start_step,
    aten.full.default, aten.zeros.default, aten.ones.default, aten.rand.default, aten.rand.generator, aten.randn.default,
    aten.randn.generator, aten.randint.default, aten.randint.low, aten.randint.generator, aten.randint.low_generator,
    aten.randperm.default, aten.randperm.generator, aten.linspace.default, aten.logspace.default, aten.eye.default,
    aten.eye.m, aten.tril_indices.default, aten.triu_indices.default, aten.scalar_tensor.default,
)  # fmt: skip


def placed(
    device_mesh: Any, placements: Sequence[Any] | None, device: Any, ndim: int
) -> tuple[Session, MeshLayout, tuple[Placement, ...]]:
    """Where a dtorch factory puts its result.

    Raises:
        PlacementError: ``device=`` and ``device_mesh=`` together, or a placement that does not fit.
    """
    if device is not None and device_mesh is not None:
        raise PlacementError("Give device= or device_mesh=, not both: the mesh already says which devices.")
    if device_mesh is None and placements is None and device is not None and torch.device(device).type != "dtorch":
        raise PlacementError(
            f"device={device!r}: dtorch's factories make distributed tensors; use torch for plain ones."
        )
    if device_mesh is None:
        session, layout = resolve_mesh(device)
    else:
        if not isinstance(device_mesh, DeviceMesh):
            raise PlacementError(f"device_mesh={device_mesh!r} is not a dtorch.DeviceMesh.")
        session = graph.session_of(device_mesh)
        layout = session.layout(device_mesh)
    return session, layout, normalize(placements, layout.ndim, ndim)
