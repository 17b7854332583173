"""From an operator on distributed tensors to commands: the path every operator takes.

The first sight of a call (operator, specs of its tensors, static arguments) makes a plan; afterwards the key built
here finds it, and running it is one ``list.extend`` and one wrapper. Keep pytree, ``str(func)`` and finalizers out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dtorch.client import aliasing, random, shadow
from dtorch.client.handle import Family, Handle
from dtorch.client.lower import Ready, encode_like, encode_plan, mark
from dtorch.client.notices import is_strict, note_fallback, refuse_gather, refuse_hidden_moves
from dtorch.client.probe import as_made, needs_probe
from dtorch.client.session import Session
from dtorch.client.sites import Site, caller
from dtorch.client.wrap import empty, is_alone, live_shadow, put, re_place, to_host, wrap
from dtorch.core.errors import DtorchError
from dtorch.core.placements import REPLICATE
from dtorch.core.spec import TensorSpec
from dtorch.core.torch_private import outside_of_dispatch
from dtorch.planner.call import Call, is_view
from dtorch.planner.lines import Free
from dtorch.planner.plan import OnClient, Plan, make_plan
from dtorch.protocol.commands import FIRST_PLAN
from dtorch.protocol.plans import NAMESPACES
from dtorch.protocol.values import dtype_from

Special = Callable[[type, Any, tuple[Any, ...], dict[str, Any]], Any]
SPECIAL: dict[Any, Special | None] = {}
_getframe = sys._getframe
_default_dtype = torch.get_default_dtype
_inference = torch.is_inference_mode_enabled
_NO_KWARGS: dict[str, Any] = {}


class Info:
    """What the key builder needs of an operator: special handling, and where its changing scalars stand.

    Args:
        kernel: the worker kernel that runs it where its plan asks for no other.
    """

    __slots__ = ("free", "kernel", "names", "numbers", "special", "writes")

    def __init__(self, func: Any, kernel: str | None = None) -> None:
        self.kernel = kernel
        self.special = find_special(func)
        arguments = func._schema.arguments
        shaped = func._schema.name.removeprefix("aten::") in _SHAPED_BY_NUMBERS
        # A command lists tensors before numbers: a number that stands before a tensor belongs to the key instead.
        last = max((i for i, a in enumerate(arguments) if "Tensor" in str(a.type)), default=-1)
        # The last tensor may be given as a number, as in ``x + 1``.
        numbers = [
            i for i, a in enumerate(arguments)
            if not shaped and ((i > last and str(a.type) in _NUMBERS) or (i == last and str(a.type) == "Tensor"))
        ]  # fmt: skip
        self.numbers = frozenset(i for i in numbers if not arguments[i].kwarg_only)
        self.names = frozenset(arguments[i].name for i in numbers)
        self.free = Free(self.numbers, self.names)
        self.writes = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


_NUMBERS = frozenset({"number", "Optional[number]", "List[number]"})  # a list for its real numbers
# The result's shape, dtype or placements depend on these operators' numbers.
_SHAPED_BY_NUMBERS = frozenset({"arange", "range", "linspace", "logspace", "histc"})
_INFO: dict[Any, Info] = {}
find_special: Callable[[Any], Special | None] = SPECIAL.get  # replaced by specials


def info_of(func: Any) -> Info:
    """The operator's info, made on first sight."""
    info = _INFO.get(func)
    if info is None:
        info = _INFO[func] = Info(func)
    return info


def dispatch(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run an operator at least one of whose tensors is distributed."""
    info = _INFO.get(func) or info_of(func)
    if info.special is not None:
        return info.special(cls, func, args, kwargs or {})
    return run(cls, func, info, args, kwargs)


def run(  # noqa: C901  (one loop, kept flat because every operator passes through it)
    cls: Any, func: Any, info: Info, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Find or make the plan of a call and run it."""
    key: list[Any] = [info, _default_dtype()]
    ids: list[Any] = []
    handle: Any = None
    add = key.append
    shadowed = True
    i = 0
    for a in args:
        t = type(a)
        if t is cls:
            handle = a._h
            if handle.odd:
                if handle._view is not None:
                    aliasing.refresh(a)
                if handle._shadow is None:
                    shadowed = False
            else:
                shadowed = False
            add(handle.spec)
            ids.append(handle.id)
        elif t is int:
            if i in info.numbers:
                add(int)
                ids.append(a)
            else:
                add(a)
        elif a is None:
            add(None)
        elif t is float:
            add(float)
            if i in info.numbers:
                ids.append(a)
            else:
                add(a)
        elif t is list or t is tuple:
            add(len(a))
            for x in a:
                tx = type(x)
                if tx is cls:
                    handle = x._h
                    if handle.odd:
                        if handle._view is not None:
                            aliasing.refresh(x)
                        if handle._shadow is None:
                            shadowed = False
                    else:
                        shadowed = False
                    add(handle.spec)
                    ids.append(handle.id)
                elif tx is int or x is None:
                    add(x)
                elif tx is float:
                    add(tx)
                    if i in info.numbers:
                        ids.append(x)
                    else:
                        add(x)
                elif tx is bool:
                    add(tx)
                    add(x)
                else:
                    return run_plain(cls, func, info, args, kwargs)
        elif t is bool:
            add(bool)
            add(a)
        elif t is str or t is complex or isinstance(a, _CONSTANTS):
            add(a)
        elif t is torch.device:
            if a.type != "dtorch":
                return other_device(cls, func, args, kwargs or {}, a)
            add(torch.device)
        else:
            return run_plain(cls, func, info, args, kwargs)
        i += 1  # noqa: SIM113  (enumerate costs a tuple each)
    if kwargs:
        for name, a in kwargs.items():
            t = type(a)
            add(name)
            if t is cls:
                handle = a._h
                if handle.odd:
                    if handle._view is not None:
                        aliasing.refresh(a)
                    if handle._shadow is None:
                        shadowed = False
                else:
                    shadowed = False
                add(handle.spec)
                ids.append(handle.id)
            elif t is int or t is float:
                add(t)
                if name in info.names:
                    ids.append(a)
                else:
                    add(a)
            elif t is bool:
                add(bool)
                add(a)
            elif isinstance(a, torch.Generator):
                if not random.is_ours(a):
                    return random.draw_on_host(cls, func, args, kwargs, a)
                add(torch.Generator)
            elif t is list or t is tuple:
                add(len(a))
                for x in a:
                    if isinstance(x, torch.Tensor):
                        return run_plain(cls, func, info, args, kwargs)
                    add(type(x))
                    add(x)
            elif a is None or t is str or t is complex or isinstance(a, _CONSTANTS):
                add(a)
            elif t is torch.device:
                if a.type != "dtorch":
                    return other_device(cls, func, args, kwargs, a)
                if a.index is not None and handle is not None and a.index != handle.spec.mesh.id:
                    return other_mesh(cls, func, args, kwargs, a)
                add(torch.device)
            else:
                return run_plain(cls, func, info, args, kwargs)
    if handle is None:
        return run_plain(cls, func, info, args, kwargs)
    session: Session = handle.session
    k = tuple(key)
    ready = session.plans.get(k)
    if ready is None:
        try:
            ready = make_ready(cls, session, func, info, args, kwargs or _NO_KWARGS, k, ids)
        except OnClient as e:
            slots = tensors_of(cls, args, kwargs or _NO_KWARGS)
            if not all(t._h.spec.is_replicated for t in slots):
                if session.config.strict or is_strict():
                    refuse_gather(func, [t.placements for t in slots])
                if not e.by_rule:
                    note_fallback(func)
            return run_on_client(cls, session, func, args, kwargs or _NO_KWARGS)
        if ready is None:  # an argument was re-placed: its spec, and so the key, changed
            return run(cls, func, info, args, kwargs)
    if ready.moves and (session.config.strict or is_strict()):
        refuse_hidden_moves(ready.plan)
    slot = ready.view_slot
    if (
        shadowed
        or not ready.plain
        or session.observer is not None
        or (slot is not None and args[0]._h._view is not None)
    ):
        return run_ready(cls, session, ready, func, info, args, kwargs or _NO_KWARGS, ids)
    new = session.ids()
    buf = session.buf
    site = caller(_getframe(2))
    session.sites.append(site)
    buf.extend((ready.code, *ids, new))
    if len(buf) > session.limit:
        session.emitted()
    if slot is None:
        out = ready.make(cls, ready.shape, ready.stride, None, None, ready.dtype, _STRIDED, ready.device)
        out._h = Handle(new, ready.spec, session, site)
        return out
    base = args[0]
    offset = base.storage_offset() + ready.offset
    if _inference() and not base.is_inference():
        # A view of a normal tensor is a normal tensor: torch refuses to count versions of an inference tensor.
        with torch.inference_mode(False):
            out = ready.make(cls, ready.shape, ready.stride, offset, None, ready.dtype, _STRIDED, ready.device)
    else:
        out = ready.make(cls, ready.shape, ready.stride, offset, None, ready.dtype, _STRIDED, ready.device)
    out._h = h = Handle(new, ready.spec, session, site)
    family = base._h.family
    if family is None:
        family = base._h.family = Family(base._h)
    h.family = family
    return out


_STRIDED = torch.strided
_CONSTANTS = (torch.dtype, torch.memory_format, torch.layout)


def make_ready(
    cls: Any,
    session: Session,
    func: Any,
    info: Info,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    key: tuple[Any, ...],
    ids: list[Any],
) -> Ready | None:
    """Plan a call seen for the first time; ``None`` when an argument was re-placed and the key must be built again."""

    def spec_of(value: Any) -> Any:
        if type(value) is cls:
            return value._h.spec
        if isinstance(value, (list, tuple)):
            return [spec_of(v) for v in value]
        return value

    strict = session.config.strict or is_strict()
    known = None if strict else session.plans.reducing.get(key)
    if known is not None and replace_reduced(cls, known, args, kwargs):
        return None
    call = Call(func, tuple(spec_of(a) for a in args), {k: spec_of(v) for k, v in kwargs.items()})
    if [k for k in key if type(k) is TensorSpec] != call.specs:
        return None  # another thread has reduced a Partial argument meanwhile
    mesh = call.first.mesh
    if any(s.mesh is not mesh for s in call.specs):
        refuse_mixture(func, tensors_of(cls, args, kwargs))
    if func.namespace not in NAMESPACES:
        raise OnClient(f"workers do not know the operators of {func.namespace}")
    family, vector = session.plans.family(info, call)
    found = family.find(vector)
    plan = make_plan(call, mesh) if found is None else found[0].plan_of(call, found[1])
    if info.kernel is not None and plan.kernel is None:
        plan = replace(plan, kernel=info.kernel)
    if strict:
        refuse_hidden_moves(plan)
    if plan.reduce and replace_reduced(cls, plan, args, kwargs):
        session.plans.reducing[key] = plan
        return None

    def send(plan: Plan) -> int:
        with session.lock:
            if found is not None and not found[0].told:
                return session.send_plan(encode_like(session, plan, found[0].kept))
            marked, marked_kwargs, numbers = mark(call, info.names, info.numbers)
            return session.send_plan(encode_plan(session, plan, marked, marked_kwargs, numbers + plan.random))

    probed = found is None and needs_probe(plan)
    if probed:
        plan = as_made(session, plan, ids, send)
    code = send(plan)
    alias = next((r.alias for r in plan.results if r.alias is not None and not r.same), None)
    ready = Ready(session, plan, code, cls, alias if is_view(func) else None)
    session.plans[key] = ready
    if found is not None:
        session.plans.derived += 1
    elif not probed and info.kernel is None:
        family.learn(vector, plan, session.wire_plans[code - FIRST_PLAN])
    return ready


def refuse_mixture(func: Any, tensors: list[Any]) -> None:
    """Raise for tensors of several meshes or sessions.

    Raises:
        SessionClosedError: one of the sessions is over.
        RuntimeError: the tensors do not go together.
    """
    for t in tensors:
        t._h.session.check_open()
    if len({t._h.session for t in tensors}) > 1:
        raise RuntimeError(f"{func} got tensors of two sessions; move one through .to_torch().")
    names = " and ".join(dict.fromkeys(str(t.device_mesh) for t in tensors))
    raise RuntimeError(
        f"Expected all tensors to be on the same device mesh, but {func} got tensors on {names}. "
        "Move one with redistribute(device_mesh=...) or .to(other.device)."
    )


def tensors_of(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Distributed tensors among the arguments, in slot order."""
    found = []
    for a in (*args, *kwargs.values()):
        if type(a) is cls:
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found.extend(x for x in a if type(x) is cls)
    return found


def run_ready(
    cls: Any, session: Session, ready: Ready, func: Any, info: Info, args: tuple[Any, ...], kwargs: dict[str, Any],
    ids: list[Any],
) -> Any:  # fmt: skip
    """Run a plan with more to it than one new result: writes, several results, random numbers, waiting, host copies."""
    plan = ready.plan
    if plan.reduce and replace_reduced(cls, plan, args, kwargs):  # it was made for tensors that share their memory
        return run(cls, func, info, args, kwargs)
    slots = tensors_of(cls, args, kwargs)
    shadowed = all(t._h._shadow is not None for t in slots)
    if plan.dynamic and not info.writes and all(live_shadow(t._h) is not None for t in slots):
        return run_on_client(cls, session, func, args, kwargs)  # the host copies tell: nothing to wait for
    if plan.random:
        ids.append(random.generator_number(session, kwargs.get("generator"), plan.mesh))
    request = None
    new = sum(not r.same for r in plan.results)
    with session.lock:
        if any(t._h.spec is not s for t, s in zip(slots, plan.call.specs, strict=True)):
            return run(cls, func, info, args, kwargs)  # another thread has reduced a Partial argument meanwhile
        first = session.take_ids(new) if new else 0
        if new:
            ids.append(first)
        if plan.dynamic:
            number, request = session.request(1)
            ids.append(number)
        site = caller(_getframe(3))
        session.sites.append(site)
        session.buf.extend((ready.code, *ids))
    if session.observer is not None:
        session.observer.ran(plan, _getframe(3))
    if plan.fallback:
        note_fallback(func)
    session.emitted()
    if request is not None:
        specs = wait_for_specs(session, plan, request)
        wrapped = [wrap(session, first + i, spec) for i, spec in enumerate(specs)]
        outs: list[Any] = wrapped
    else:
        outs = wrap_results(cls, session, ready, slots, first, site)
    for i in info.writes:
        written = args[i] if i < len(args) else kwargs.get(func._schema.arguments[i].name)
        for t in written if isinstance(written, (list, tuple)) else (written,):
            if type(t) is cls:
                aliasing.wrote(t)
    if shadowed:
        shadow.follow(cls, func, args, kwargs, outs, plan)
    else:
        shadow.forget_written(cls, info, func, args, kwargs)
    if plan.copies_view or (ready.view_slot is not None and slots[ready.view_slot]._h.view is not None):
        # A view of a copied view is as stale, and as written back, as its base.
        aliasing.register_copies(cls, func, args, kwargs, outs, plan)
    return shape_like(plan.template, outs)


def wrap_results(cls: Any, session: Session, ready: Ready, slots: list[Any], first: int, site: Site) -> list[Any]:
    """Wrappers of the results: new ones, and the written arguments themselves."""
    plan = ready.plan
    outs: list[Any] = []
    number = first
    outside = False
    if ready.view_slot is not None and _inference():
        outside = not slots[ready.view_slot].is_inference()
    for r, make in zip(plan.results, ready.makers, strict=True):
        if make is None:
            assert r.alias is not None
            outs.append(slots[r.alias])
            continue
        assert r.spec is not None
        spec = r.spec
        base = slots[r.alias] if r.alias is not None else None
        if base is not None:
            offset = base.storage_offset() + r.offset if r.offset or base.storage_offset() else None
            if outside:
                with torch.inference_mode(False):
                    out = make(storage_offset=offset)
            else:
                out = make(storage_offset=offset)
            out._h = Handle(number, spec, session, site)  # type: ignore[attr-defined]
            aliasing.join(out._h, base._h)  # type: ignore[attr-defined]
        else:
            out = make()
            out._h = Handle(number, spec, session, site)  # type: ignore[attr-defined]
        outs.append(out)
        number += 1
    return outs


def wait_for_specs(session: Session, plan: Plan, request: Any) -> list[Any]:
    """Specs of results that only the workers know: waits for them."""
    session.reads += 1
    session.flush()
    session.finish(request)
    whole = (REPLICATE,) * plan.mesh.ndim
    return [session.make_spec(plan.mesh, whole, shape, stride, dtype_from(d)) for shape, stride, d in request.meta]


def replace_reduced(cls: Any, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Reduce Partial arguments in place of themselves, so that the next consumer finds them reduced.

    Returns:
        Whether any was; a tensor that shares its memory stays as it is and is reduced within the plan.
    """
    slots = tensors_of(cls, args, kwargs)
    before = [slots[slot]._h.spec for slot, _ in plan.reduce]
    for slot, target in plan.reduce:
        if is_alone(slots[slot]._h):
            re_place(slots[slot]._h, target)
    return any(slots[slot]._h.spec is not spec for (slot, _), spec in zip(plan.reduce, before, strict=True))


def shape_like(template: Any, outs: list[Any]) -> Any:
    """Results in the operator's structure."""
    if type(template) is int:
        return outs[template]
    if isinstance(template, list):
        return [shape_like(t, outs) for t in template]
    return None


def run_plain(cls: Any, func: Any, info: Info, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Arguments that are not cacheable as they are: plain tensors join as replicated, numpy scalars become numbers."""
    kwargs = kwargs or {}
    mesh_of = next(iter(tensors_of(cls, args, kwargs)), None)
    if mesh_of is None:
        raise DtorchError(f"{func} reached dtorch without a distributed tensor.")
    session: Session = mesh_of._h.session
    layout = mesh_of._h.spec.mesh
    arguments = func._schema.arguments
    changed = False

    def convert(value: Any, writes: bool) -> Any:
        nonlocal changed
        if type(value) is cls:
            if value._h.session is not session:
                raise RuntimeError(f"{func} got tensors of two sessions; move one through .to_torch().")
            return value
        if isinstance(value, torch.Tensor):
            changed = True
            if writes:
                raise RuntimeError(
                    f"{func} would write the values of a distributed tensor into a plain {value.device} tensor of shape "
                    f"{tuple(value.shape)}. Bring them here first with .to_torch() or .cpu()."
                )
            return put(session, value, layout)
        if isinstance(value, (list, tuple)):
            return [convert(v, writes) for v in value]
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) or type(value).__module__ == "numpy":
            changed = True
            return value.item() if hasattr(value, "item") else int(value)
        return value

    def writes(i: int) -> bool:
        return i in info.writes

    names = {a.name: i for i, a in enumerate(arguments)}
    new_args = tuple(convert(a, writes(i)) for i, a in enumerate(args))
    new_kwargs = {k: convert(v, writes(names.get(k, -1))) for k, v in kwargs.items()}
    if not changed:
        raise DtorchError(f"{func} got an argument that dtorch cannot send to workers: {args!r:.200} {kwargs!r:.200}")
    return run(cls, func, info, new_args, new_kwargs)


def run_on_client(cls: Any, session: Session, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the tensors here, run the operator, place its tensor results replicated; what it writes goes back."""
    mesh = tensors_of(cls, args, kwargs)[0]._h.spec.mesh
    gathered: list[tuple[Any, torch.Tensor]] = []

    def convert(value: Any) -> Any:
        if type(value) is cls:
            gathered.append((value, to_host(value)))
            return gathered[-1][1]
        return [convert(v) for v in value] if isinstance(value, (list, tuple)) else value

    def back(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            argument = next((t for t, host in gathered if host is value), None)
            return put(session, value, mesh) if argument is None else argument
        return [back(v) for v in value] if isinstance(value, (list, tuple)) else value

    host_args, host_kwargs = [convert(a) for a in args], {k: convert(v) for k, v in kwargs.items()}
    names = [a.name for a in func._schema.arguments]
    written = [args[i] if i < len(args) else kwargs.get(names[i]) for i in info_of(func).writes]
    with outside_of_dispatch(), torch.no_grad():
        value = func(*host_args, **host_kwargs)
    with torch.no_grad():
        for t, host in gathered:
            if any(t is w or (isinstance(w, (list, tuple)) and any(t is v for v in w)) for w in written):
                t.copy_(host)
    return back(value)


def other_device(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """``new_zeros(..., device="cpu")`` and the like: the result is a plain tensor there; only metadata is needed."""

    def stand_in(value: Any) -> Any:
        if type(value) is cls:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if isinstance(value, (list, tuple)):
            return [stand_in(v) for v in value]
        return value

    return func(*map(stand_in, args), **{k: stand_in(v) for k, v in kwargs.items()})


def other_mesh(cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """The same with a device of another mesh: the stand-in lives there, replicated."""
    base = tensors_of(cls, args, kwargs)[0]
    session: Session = base._h.session
    there = session.layout(session.mesh(device.index))

    def stand_in(value: Any) -> Any:
        if type(value) is cls:
            return empty(session, value.shape, value.stride(), value.dtype, there)
        return value

    return func(*map(stand_in, args), **kwargs)
