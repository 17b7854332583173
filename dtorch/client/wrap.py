"""Making wrappers, uploading, moving and fetching tensors: what the dispatcher and its specials are built from."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from sys import getrefcount
from typing import Any

import torch

from dtorch.client.handle import Family, Handle
from dtorch.client.lower import encode_move, wrapper_maker
from dtorch.client.request import Request
from dtorch.client.session import Session
from dtorch.client.shared import Segment, pieces
from dtorch.client.sites import Site, caller
from dtorch.core.pieces import put_piece
from dtorch.core.placements import REPLICATE, Placement
from dtorch.core.spec import MeshLayout, TensorSpec, dense_strides
from dtorch.planner.redistribute import plan_steps
from dtorch.protocol import commands as C
from dtorch.protocol.values import dtype_name

# Values small enough to keep a copy in the client: whole numbers steer masks, positions and stopping; real numbers
# are schedules.
_SHADOW_WHOLE, _SHADOW_REAL = 16384, 1024
# Values from this size on do not travel in the stream, where workers can share this process's memory.
_LARGE_BYTES = 1 << 20
_PIECE_BYTES = 32 << 20  # of values that go to a pool
_MOST_SEGMENTS = 64  # values that are fetched into shared memory at the same time


class _Class:
    """The tensor class, set by ``client.tensor`` (which imports this module)."""

    tensor: type = torch.Tensor


def wrap(session: Session, tensor_id: int, spec: TensorSpec, offset: int = 0) -> Any:
    """A wrapper for an existing id."""
    make = wrapper_maker(_Class.tensor, spec, torch.device("dtorch", spec.mesh.id))
    out: Any = make(storage_offset=offset or None)
    out._h = Handle(tensor_id, spec, session, caller(sys._getframe(1)))
    return out


def rewrap(h: Handle) -> Any:
    """Another wrapper of the tensor of this handle."""
    out: Any = wrapper_maker(_Class.tensor, h.spec, torch.device("dtorch", h.spec.mesh.id))()
    out._h = h
    return out


def small_enough(shape: Sequence[int], dtype: torch.dtype, rearranged: bool = False) -> bool:
    """Whether a tensor made from host data keeps a host copy; ``rearranged``: one of constants, or of elements moved about."""
    real = dtype.is_floating_point or dtype.is_complex
    if real and len(shape) > 1 and not rearranged:
        return False  # data, not a schedule
    n = 1
    for s in shape:
        n *= s
    return n <= (_SHADOW_REAL if real else _SHADOW_WHOLE)


def host_bytes(t: torch.Tensor) -> bytes:
    """A plain tensor's elements in row-major order."""
    if t.numel() == 0:
        return b""
    flat = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride, which view(dtype) refuses
    return bytes(memoryview(flat.view(torch.uint8).numpy().data))


def put(
    session: Session, t: torch.Tensor, mesh: MeshLayout, placements: tuple[Placement, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Upload a plain tensor; every device keeps its part. Strides follow torch's ``.to(device, dtype)``."""
    if t.layout != torch.strided or t.is_quantized or t.is_nested:
        kind = "quantized" if t.is_quantized else "nested" if t.is_nested else str(t.layout)
        raise RuntimeError(f"A {kind} tensor cannot be distributed: dtorch takes strided ones. Call .to_dense() first.")
    if session.recorder is not None:
        session.recorder.uploads(t)
    parameter = t.requires_grad  # trained, not steered by
    with torch.no_grad(), torch.inference_mode(False):
        t = t.detach().cpu()
        stride = torch.empty_like(t, device="meta").stride()
    dtype = dtype or t.dtype
    whole = tuple(placements) if placements is not None else (REPLICATE,) * mesh.ndim
    held = tuple(REPLICATE if p.is_partial() else p for p in whole)
    spec = session.make_spec(mesh, held, t.shape, stride, dtype)
    new = session.ids()
    with torch.no_grad(), torch.inference_mode(False):
        _send(session, new, spec, t)
        shadow = t.to(dtype, copy=True) if small_enough(t.shape, dtype) and not parameter else None
    out = wrap(session, new, spec)
    out._h.shadow = shadow
    return out if held == whole else move(out, session.make_spec(mesh, whole, t.shape, stride, dtype))


def _send(session: Session, tensor_id: int, spec: TensorSpec, t: torch.Tensor) -> None:
    """Bring the value of a plain CPU tensor to the workers: from its file, through shared memory or in the stream."""
    config = session.config
    if spec.nbytes >= _LARGE_BYTES:
        site = caller(sys._getframe(1))
        if not config.null_workers and session.files.load_mapped(tensor_id, spec, t, site):
            return
        if config.shares_memory:
            session.arena.send(tensor_id, spec, t, site)
            return
        if config.mode == "cluster":
            _send_pieces(session, tensor_id, spec, t, site)
            return
    session.upload(tensor_id, spec, host_bytes(t.to(spec.dtype)))


def _send_pieces(session: Session, tensor_id: int, spec: TensorSpec, t: torch.Tensor, site: Site) -> None:
    """Send a tensor in messages of bounded size, each at once: a pool takes no others."""
    with session.lock:
        number, name = session.spec_id(spec), dtype_name(spec.dtype)
        try:
            for part, box in pieces(t, _PIECE_BYTES // spec.dtype.itemsize):
                data = host_bytes(part.to(spec.dtype))
                session.frames.append(data)
                session._bytes += len(data)
                session.sites.append(site)
                frame = -len(session.frames)
                session.buf.extend((C.LOAD, tensor_id, number, frame, 0, name, box, "a plain tensor"))
                session.flush()
        except BaseException:
            session.buf.append(-tensor_id)
            raise


def moved_spec(session: Session, spec: TensorSpec, mesh: MeshLayout, placements: tuple[Placement, ...]) -> TensorSpec:
    """Spec of a tensor after redistribution: a fresh dense tensor in the same memory order."""
    return session.make_spec(
        mesh, placements, spec.shape, dense_strides(spec.shape, spec.shape, spec.stride), spec.dtype
    )


def emit_move(session: Session, src_id: int, src: TensorSpec, dst_id: int, dst: TensorSpec) -> None:
    """Append a redistribution from one id to another (or the same)."""
    key = ("move", src, dst)
    code: Any = session.plans.get(key)
    steps = plan_steps(src, dst)
    if code is None:
        with session.lock:
            code = session.send_plan(encode_move(session, steps, src, dst))
        session.plans[key] = code
    session.sites.append(caller(sys._getframe(1)))
    session.buf.extend((code, src_id, dst_id))
    if session.observer is not None:
        session.observer.moved(src, dst, steps, sys._getframe(1))
    session.emitted()


def move(t: Any, target: TensorSpec) -> Any:
    """A new tensor with the same value on ``target``'s mesh and placements."""
    h: Handle = t._h
    session = h.session
    new = session.ids()
    emit_move(session, h.id, h.spec, new, target)
    out = wrap(session, new, target)
    out._h.shadow = live_shadow(h)
    if out._h.shadow is not None:
        out._h.shadow = out._h.shadow.clone()
    return out


def alias(t: Any) -> Any:
    """Another tensor in the same memory (a copied view must be fresh; the alias does not follow later writes to it)."""
    h: Handle = t._h
    new = h.session.ids()
    emit_move(h.session, h.id, h.spec, new, h.spec)
    out = wrap(h.session, new, h.spec, t.storage_offset())
    if h.family is None:
        h.family = Family(h)
    out._h.family = h.family
    out._h.shadow = live_shadow(h)
    return out


def re_place(h: Handle, target: TensorSpec) -> None:
    """Re-place a tensor itself: the same object, value and id, other placements. It must be alone (``is_alone``).

    Threads may read one tensor at once. Commands that read a Partial tensor are appended under the same lock.
    """
    with h.session.lock:
        if h.spec is not target:
            emit_move(h.session, h.id, h.spec, h.id, target)
            h.spec = target


def live_shadow(h: Handle) -> Any:
    """The host copy, if it still tells the truth."""
    if h.shadow is None or (h.family is not None and h.family.shadow_lost):
        return None
    return h.shadow


def is_alone(h: Handle) -> bool:
    """Whether nothing shares its memory, and it shows all of it; so the gradient that autograd leaves, a view of one
    that is gone."""
    family = h.family
    if family is None:
        return True
    # The handle's, the variable's and the argument's: no other handle is of the family.
    return getrefcount(family) == 3 and h._view is None and family.nbytes == h.spec.nbytes and h.spec.is_dense


def reduced(t: Any) -> Any:
    """The tensor without Partial axes: itself, re-placed when nothing shares its memory, else a copy."""
    h: Handle = t._h
    if not h.spec.has_partial:
        return t
    placements = tuple(REPLICATE if p.is_partial() else p for p in h.spec.placements)
    if is_alone(h):
        re_place(h, h.spec.replace(placements))
        return t
    return move(t, moved_spec(h.session, h.spec, h.spec.mesh, placements))


class Pending:
    """A value on its way to the client."""

    def __init__(self, t: Any) -> None:
        """Ask for the value of a distributed tensor (its copied view must be fresh)."""
        t = reduced(t)
        h: Handle = t._h
        self.spec, self.session = h.spec, h.session
        self.keep = t  # the tensor must not be freed before the workers have read it
        self.positions = sorted({h.spec.spans(p): p for p in range(h.spec.mesh.size)}.values())
        self.segment: Segment | None = None
        large = h.spec.nbytes >= _LARGE_BYTES and Segment.live < _MOST_SEGMENTS
        if large and self.session.config.shares_memory:
            with suppress(OSError):  # too many descriptors, or no memory: then the value comes in the stream
                self.segment = Segment(h.spec.nbytes)
        self.request: Request = self.session.fetch(h.id, h.spec, self.positions, self.segment)

    def get(self) -> torch.Tensor:
        """Wait and assemble.

        Raises:
            RemoteError: the value was never made.
        """
        self.session.finish(self.request)
        spec = self.spec
        stride = dense_strides(spec.shape, spec.shape, spec.stride)
        with torch.inference_mode(False), torch.no_grad():
            if self.segment is not None:
                value = self.segment.bytes(mmap.MAP_PRIVATE).view(spec.dtype).as_strided(spec.shape, stride)
                self.segment.close()
                return value
            pieces = [_tensor(self.request.parts[p], spec, p) for p in self.positions]
            full = pieces[0]
            if len(pieces) > 1:
                full = torch.empty(spec.shape, dtype=spec.dtype)
                for p, piece in zip(self.positions, pieces, strict=True):
                    put_piece(full, spec, p, piece)
            if not spec.is_contiguous:
                full = torch.empty_strided(spec.shape, stride, dtype=spec.dtype).copy_(full)
        return full


def piece(t: Any, position: int) -> torch.Tensor:
    """What the device at this position of the mesh holds, as a plain CPU tensor; waits.

    Raises:
        RemoteError: the value was never made.
    """
    from dtorch.client.aliasing import refresh

    refresh(t)
    h: Handle = t._h
    request = h.session.fetch(h.id, h.spec, [position])
    h.session.finish(request)
    return _tensor(request.parts[position], h.spec, position)


def _tensor(data: memoryview, spec: TensorSpec, position: int) -> torch.Tensor:
    shape = spec.local_shape(position)
    if not len(data):
        return torch.empty(shape, dtype=spec.dtype)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return flat.view(spec.dtype).view(shape)


def to_host(t: Any) -> torch.Tensor:
    """The value as a plain CPU tensor; from the host copy when there is one, else from the workers."""
    from dtorch.client.aliasing import refresh

    if t._h.view is not None:
        refresh(t)
    shadow = live_shadow(t._h)
    if shadow is not None:
        recorder = t._h.session.recorder
        if recorder is not None:
            recorder.reads_copy(t._h, caller(sys._getframe(1)))
        with torch.inference_mode(False), torch.no_grad():
            value: torch.Tensor = shadow.detach().clone()
    else:
        value = Pending(t).get()
    return value


def empty(session: Session, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, mesh: MeshLayout) -> Any:
    """An uninitialised tensor, replicated on the mesh."""
    spec = session.make_spec(mesh, (REPLICATE,) * mesh.ndim, shape, stride, dtype)
    new = session.ids()
    code: Any = session.plans.get(("empty", spec))
    if code is None:
        data = [
            "aten::empty_strided.default", mesh.id, [], 0, [list(spec.shape), list(spec.stride)],
            {"dtype": {"d": dtype_name(dtype)}, "device": {"x": 0}}, [], [], [[session.spec_id(spec), None, False]],
            None, None, 0, [], [],
        ]  # fmt: skip
        code = session.send_plan(data)
        session.plans[("empty", spec)] = code
    session.sites.append(caller(sys._getframe(1)))
    session.buf.extend((code, new))
    session.emitted()
    return wrap(session, new, spec)
