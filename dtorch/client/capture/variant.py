"""A record ready to run: when it fits a call, and how the call is answered by it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from dtorch.client import random
from dtorch.client.aliasing import join
from dtorch.client.capture.key import Arguments
from dtorch.client.capture.recording import Recording, find_handles
from dtorch.client.handle import Family, Handle
from dtorch.client.lower import wrapper_maker
from dtorch.client.sites import Site, caller
from dtorch.client.tensor import DTensor
from dtorch.client.wrap import live_shadow
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.core.torch_private import trees
from dtorch.protocol import commands as C
from dtorch.protocol.records import encode_record

_numbers = itertools.count()


class Variant:
    """One record of one kind of call.

    Args:
        recording: the last of two that are equal.
        fuse: whether workers may compile it into functions whose results differ in the last bits.

    Raises:
        Refused: a tensor that it has read is gone.
    """

    def __init__(self, recording: Recording, fuse: bool) -> None:
        stream, session = recording.stream, recording.session
        self.session = session
        self._state = recording.state
        handles = find_handles(session, stream.captured)
        known = {id(h) for h in recording.state.handles}
        # What the state does not see is looked at by itself, and not kept alive.
        self._others = [weakref.ref(h) for h in handles if id(h) not in known]
        self._other_ids = [h.id for h in handles if id(h) not in known]
        self._sources = recording.recorder.sources
        self._steered_by = recording.steered_by
        arguments = len(recording.argument_ids)
        self._written = [v - 1 for v in sorted(stream.written) if v <= arguments]
        self._changed = [weakref.ref(handles[v - 1 - arguments]) for v in sorted(stream.written) if v > arguments]
        changed = {id(ref()) for ref in self._changed}
        self._counted = [t for t in recording.state.tensors if id(t._h) in changed and not t.is_inference()]
        self._specs_after = _specs_after(recording)
        self._same_as = self._arguments_seen_elsewhere(recording)
        self._gradients(recording)
        self._makers = [_Maker(t, recording, handles) for t in recording.made]
        self._leaves, self._tree = recording.leaves, recording.tree
        self._only = recording.leaves[0][1] if _is_single(recording) else None
        self._sites = recording.sites
        self._draws = _draws(recording)
        self.number = next(_numbers)
        with session.lock:
            session.records[self.number] = data = encode_record(replace(recording.wire, fuse=fuse))
            session.buf.extend((C.RECORD, self.number, data))

    def __del__(self) -> None:
        if "number" in self.__dict__:  # it was sent
            self.session.records.pop(self.number, None)
            self.session.buf.extend((C.RECORD, self.number, None))

    def _arguments_seen_elsewhere(self, recording: Recording) -> list[tuple[int, int]]:
        """Arguments that the function also reaches by itself: the record cannot tell the two roles apart."""
        reached = {id(h) for h in recording.state.handles}
        return [
            (k, x)
            for k, (h, x) in enumerate(zip(recording.arguments.handles, recording.argument_ids, strict=True))
            if id(h) in reached
        ]

    def _gradients(self, recording: Recording) -> None:
        """Which tensors must have a gradient, must have none, or must have the one that the record reads."""
        captured, places = set(recording.stream.captured), {id(t): k for k, t in enumerate(recording.arguments.tensors)}
        holders = {id(t): t for t in (*recording.arguments.tensors, *recording.state.tensors)}
        self._none: list[Any] = []
        self._some: list[Any] = []
        self._given: list[tuple[int, int | None]] = []  # the same for arguments, by place: id, 0 for any, or none
        reads = any(grad is not None and grad.id in captured for grad in recording.grads.values())
        matter = reads or recording.gradients or recording.cleared or torch.is_grad_enabled()
        for key, grad in recording.grads.items() if matter else ():
            if key in places:
                self._given.append((places[key], None if grad is None else grad.id if grad.id in captured else 0))
            else:
                (self._none if grad is None else self._some).append(holders[key])
        held = [recording.grads[id(t)] for t in self._some]
        self._grad_ids = [h.id if h is not None and h.id in captured else 0 for h in held]
        # Place among the arguments, or the tensor itself.
        self._sets: list[tuple[int | None, Any, int]] = [
            (places.get(id(t)), None if id(t) in places else t, j) for t, j in recording.gradients
        ]
        self._clears: list[tuple[int | None, Any]] = [
            (places.get(id(t)), None if id(t) in places else t) for t in recording.cleared
        ]

    # -- whether it fits --------------------------------------------------------------------------------------------
    def fits(self, call: Arguments) -> bool:
        """Whether a call of the kind would issue just what was recorded."""
        return (
            self.session.closed is None
            and self._state.holds()
            and all(map(_is_still, self._others, self._other_ids))
            and all(t._version == version for t, version in self._sources)
            and (not self._steered_by or all(self._is_as_seen(call, who, value) for who, value in self._steered_by))
            and all(call.handles[k].id == x for k, x in self._same_as)
            and (not self._none or all(t.grad is None for t in self._none))
            and (not self._some or self._have_gradients())
            and (not self._given or all(_has(call.tensors[k].grad, wanted) for k, wanted in self._given))
        )

    def misfit(self) -> str:
        """What has changed since, in words."""
        return self._state.change() or "a tensor that it reads"

    def _have_gradients(self) -> bool:
        return all(_has(t.grad, wanted) for t, wanted in zip(self._some, self._grad_ids, strict=True))

    def _is_as_seen(self, call: Arguments, who: int | Handle, value: Any) -> bool:
        now = live_shadow(call.handles[who] if isinstance(who, int) else who)
        with torch.inference_mode(False), torch.no_grad():
            return now is not None and now.dtype == value.dtype and bool(torch.equal(now, value))

    # -- running ----------------------------------------------------------------------------------------------------
    def replay(self, call: Arguments, frame: FrameType) -> Any:
        """Run the record; returns what the call would.

        Raises:
            DtorchError: the session cannot go on.
        """
        session = self.session
        for stream, start, end in self._draws:
            if stream.pending_state is not None or stream.seed is not None or stream.home is not start:
                random.bring(session, stream, start)
            stream.home = end
        for _, t, _ in self._sets:
            if t is not None and t.grad is not None and t.grad._h.id not in self._grad_ids:
                t.grad = None  # freed before its successor is made
        with session.lock:
            count = len(self._makers)
            first = session.ids() if count == 1 else session.take_ids(count) if count else 0
            site = caller(frame)
            session.sites.append_replay(site, self._sites)
            session.buf.extend((C.REPLAY, self.number, *[h.id for h in call.handles], first))
            for k, spec in self._specs_after:
                call.handles[k].spec = spec
        session.flush()
        for k in self._written:
            _note_write(call.handles[k])
        for ref in self._changed:
            handle = ref()
            if handle is not None:
                _note_write(handle)
        if self._counted or self._written:  # autograd refuses to use saved tensors that have been written since
            given = [t for k in self._written if not (t := call.tensors[k]).is_inference()]
            increment_version([*self._counted, *given])
        if self._only is not None and count == 1:
            return self._makers[0].make(first, call, [], site)
        made: list[Any] = []
        for j, maker in enumerate(self._makers):
            made.append(maker.make(first + j, call, made, site))
        for place, t, j in self._sets:
            (t if place is None else call.tensors[place]).grad = made[j]
        for place, t in self._clears:
            (t if place is None else call.tensors[place]).grad = None
        return trees().tree_unflatten([self._leaf(kind, value, call, made) for kind, value in self._leaves], self._tree)

    @staticmethod
    def _leaf(kind: str, value: Any, call: Arguments, made: list[Any]) -> Any:
        return value if kind == "value" else call.leaves[value] if kind == "argument" else made[value]


class _Maker:
    """Makes the wrapper of one new tensor, and lets it share memory with what it is a view of."""

    def __init__(self, t: Any, recording: Recording, captured: list[Handle]) -> None:
        h: Handle = t._h
        self._spec, self._session, self._offset = h.spec, h.session, t.storage_offset() or None
        self._make: Callable[..., Any] = wrapper_maker(DTensor, h.spec, torch.device("dtorch", h.spec.mesh.id))
        self._inference = None if t.is_inference() == torch.is_inference_mode_enabled() else t.is_inference()
        self._base: tuple[str, Any] | None = None
        family = h.family
        if family is None:
            return
        for k, argument in enumerate(recording.arguments.handles):
            if argument.family is family:
                self._base = "argument", k
                return
        for other in captured:
            if other.family is family:
                self._base = "captured", weakref.ref(other)
                return
        self._base = "own", next(j for j, other in enumerate(recording.made) if other._h.family is family)

    def make(self, tensor_id: int, call: Arguments, made: list[Any], site: Site) -> Any:
        """The wrapper of the tensor with this id; it was made where the record ran."""
        if self._inference is None:
            out = self._make(storage_offset=self._offset)
        else:
            with torch.inference_mode(self._inference):
                out = self._make(storage_offset=self._offset)
        out._h = h = Handle(tensor_id, self._spec, self._session, site)
        if self._base is None:
            return out
        kind, which = self._base
        if kind == "captured":
            handle = which()
            if handle is not None:
                join(h, handle)
        elif kind == "own" and which == len(made):
            h.family = Family(h)
        else:
            base = call.tensors[which] if kind == "argument" else made[which]
            join(h, base._h)
            out._keeps = base  # as torch's views keep what they are views of
        return out


def _is_still(ref: Any, number: int) -> bool:
    handle = ref()
    return handle is not None and handle.id == number


def _has(grad: Any, wanted: int | None) -> bool:
    """Whether a gradient is the one with this id; any with 0, none with ``None``."""
    if grad is None or wanted is None:
        return grad is None and wanted is None
    return wanted == 0 or grad._h.id == wanted


def _note_write(handle: Handle) -> None:
    """A record has written the tensor: copies of it are old."""
    family = handle.family
    if family is not None:
        family.version += 1
        family.shadow_lost = True
    if handle._shadow is not None:
        handle.shadow = None


def _is_single(recording: Recording) -> bool:
    """Whether the result is one new tensor and nothing else happens."""
    return recording.leaves == [("new", 0)] and recording.tree.is_leaf() and not (recording.gradients or recording.cleared)


def _specs_after(recording: Recording) -> list[tuple[int, TensorSpec]]:
    """Arguments that the call has re-placed: their specs afterwards."""
    handles = recording.arguments.handles
    return [(k, handles[k].spec) for k, x in enumerate(recording.argument_ids) if x in recording.stream.replaced]


def _draws(recording: Recording) -> list[tuple[random.Stream, MeshLayout, MeshLayout]]:
    """Generators that the record draws from: where their states must be before, and are afterwards."""
    found = []
    for stream in random.every_stream(recording.session):
        mesh = recording.stream.draws.get(stream.number)
        if mesh is not None:
            assert stream.home is not None, "it has drawn"
            found.append((stream, recording.recorder.homes.get(stream) or mesh, stream.home))
    return found

