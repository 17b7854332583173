"""``dtorch.capture``: a function whose calls are recorded, and from then on replayed by one command."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from dtorch.client import graph
from dtorch.client.capture.key import Arguments
from dtorch.client.capture.recorder import Recorder
from dtorch.client.capture.recording import (
    Outline,
    Recording,
    Refused,
    difference,
    examine,
    shadows_of,
    unexplained,
    where,
)
from dtorch.client.capture.state import State, TooMuch, watch_modules
from dtorch.client.capture.variant import Variant
from dtorch.client.handle import Handle
from dtorch.client.sites import caller
from dtorch.client.tensor import DTensor
from dtorch.core.torch_private import modes_are_active

# A kind of call is given up when so many calls have not given two equal recordings.
_MOST_TRIES = 4
# Records kept of one kind of call, for states that alternate, such as training and evaluation.
_MOST_VARIANTS = 4
# So many records in a row that were of no use: the state, or the arguments, are others in every call.
_MOST_IN_VAIN = 4
_MOST_KINDS_IN_VAIN = 64
# Kinds of calls of one function that are remembered, the latest.
_MOST_KINDS = 256
_recording = threading.Lock()


class CaptureWarning(UserWarning):
    """Calls of a captured function cannot be replayed: they run operator by operator, as without capture."""


class _Kind:
    """Calls with equal keys.

    Attributes:
        variants: records, the oldest first.
        outlines: of recordings that have had no equal so far.
        refused: why the last recording made none, if so.
        tries: recordings since the last record was made; in_vain: records made since the last replay.
    """

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.outlines: list[Outline] = []
        self.refused: Refused | None = None
        self.tries = self.in_vain = 0
        self.given_up = False


class Captured:
    """A function, or module, whose calls are replayed where that gives the same; made by ``dtorch.capture``.

    Attributes:
        captured_function: what was captured.
        compile: whether workers compile it.
        recordings: calls that ran operator by operator and were recorded.
        replays: calls that were one command.
        refusals: why calls of some kind cannot be replayed, each once.
    """

    captured_function: Any

    def __init__(self, function: Callable[..., Any], compile: bool = False) -> None:
        watch_modules()
        self.captured_function = function
        self.compile = compile
        self.recordings = self.replays = 0
        self.refusals: list[str] = []
        self._kinds: dict[Any, _Kind] = {}
        self._kinds_in_vain = 0  # kinds met since the last replay
        self._given_up = False
        functools.update_wrapper(self, function, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<captured {self.captured_function!r}: {self.recordings} recordings, {self.replays} replays>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._given_up or _recording.locked() or modes_are_active():
            return self.captured_function(*args, **kwargs)
        call = Arguments(args, kwargs)
        kind = self._kinds.get(call.key)
        if kind is None:
            kind = self._new_kind(call.key, sys._getframe(1))
        if kind.given_up:
            return self.captured_function(*args, **kwargs)
        for variant in kind.variants:
            if variant.fits(call) and variant.session.observer is None:
                result = variant.replay(call, sys._getframe(1))
                self.replays += 1
                kind.in_vain = self._kinds_in_vain = 0
                return result
        if not _recording.acquire(blocking=False):
            return self.captured_function(*args, **kwargs)  # another thread records: its stream must stay its own
        try:
            return self._record(kind, call, args, kwargs, sys._getframe(1))
        finally:
            _recording.release()

    # -- recording --------------------------------------------------------------------------------------------------
    def _record(
        self, kind: _Kind, call: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Run a call as it is, and note what it sends."""
        sessions = graph.sessions() or [graph.current_session()]
        if any(session.observer is not None for session in sessions):
            return self.captured_function(*args, **kwargs)
        try:
            if call.plain is not None:
                raise Refused("an argument is a plain tensor, which would be uploaded in each call; move it to the mesh")
            before = State([self.captured_function, *call.objects])
        except (Refused, TooMuch) as e:
            reason = e if isinstance(e, Refused) else Refused("it can reach more objects than can be compared")
            self._give_up(kind, reason, frame)
            return self.captured_function(*args, **kwargs)
        grads = {id(t): _grad_of(t) for t in (*call.tensors, *before.tensors) if t.requires_grad and t.is_leaf}
        ids, shadows = tuple(h.id for h in call.handles), shadows_of(call)
        recorders = [Recorder(session) for session in sessions]
        for recorder in recorders:
            recorder.start(alone=len(sessions) == 1)
        try:
            result = self.captured_function(*args, **kwargs)
            attempt = self._examine(recorders, call, ids, before, grads, shadows, result)
        finally:
            for recorder in recorders:
                recorder.stop()
        self.recordings += 1
        self._conclude(kind, attempt, frame)
        return result

    def _examine(
        self, recorders: list[Recorder], call: Arguments, ids: tuple[int, ...], before: State,
        grads: dict[int, Handle | None], shadows: dict[int, Any], result: Any,
    ) -> Recording | Refused:  # fmt: skip
        try:
            for recorder in recorders:
                recorder.flush()
            busy = [r for r in recorders if r.sites] or recorders[:1]
            if len(busy) > 1:
                raise Refused("it works in several sessions")
            recording = examine(busy[0], call, ids, before, grads, shadows, result)
            refused = unexplained(recording)
            if refused is not None:
                gc.collect()  # what only a cycle of garbage holds is dropped now
                busy[0].flush()
                recording = examine(busy[0], call, ids, before, grads, shadows, result)
                refused = unexplained(recording)
            return refused or recording
        except Refused as e:
            return e

    def _conclude(self, kind: _Kind, attempt: Recording | Refused, frame: FrameType) -> None:
        """Make a record of two equal recordings, give up after too many that are not, or wait for the next call."""
        last, kind.refused = kind.refused, attempt if isinstance(attempt, Refused) else None
        kind.tries += 1
        reason: Refused | None = None
        if isinstance(attempt, Refused):
            # The first call may do what later ones do not: make an optimizer's state, ask workers for a layout.
            reason = attempt if last is not None or kind.tries >= _MOST_TRIES else None
        else:
            equal = next((o for o in kind.outlines if o.packed == attempt.packed), None)
            if equal is not None:
                kind.outlines.remove(equal)
                kind.tries = 0
                reason = self._add(kind, attempt)
            else:
                kind.outlines.append(attempt.outline)
                if kind.tries >= _MOST_TRIES:
                    reason = difference(*kind.outlines[-2:]) if len(kind.outlines) > 1 else last
        if reason is not None:
            self._give_up(kind, reason, frame)

    def _add(self, kind: _Kind, recording: Recording) -> Refused | None:
        kind.in_vain += 1
        if kind.in_vain > _MOST_IN_VAIN:
            return Refused(f"what it depends on is another in almost every call: {kind.variants[-1].misfit()}")
        try:
            kind.variants = [*kind.variants[1 - _MOST_VARIANTS :], Variant(recording, self.compile)]
        except Refused as e:
            return e
        return None

    def _new_kind(self, key: Any, frame: FrameType) -> _Kind:
        kind = self._kinds[key] = _Kind()
        self._kinds_in_vain += 1
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.pop(next(iter(self._kinds)))
        if self._kinds_in_vain > _MOST_KINDS_IN_VAIN:
            self._give_up(kind, Refused("its arguments are of another kind in almost every call"), frame)
            self._given_up = True
            self._kinds.clear()
        return kind

    def _give_up(self, kind: _Kind, reason: Refused, frame: FrameType) -> None:
        kind.given_up = True
        kind.variants.clear()
        kind.outlines.clear()
        if reason.reason in self.refusals:
            return
        self.refusals.append(reason.reason)
        file, _, line = (where(reason.site) or where(caller(frame)) or "?:0").rpartition(":")
        name = getattr(self.captured_function, "__name__", type(self.captured_function).__name__)
        warnings.warn_explicit(
            f"{name} cannot be captured and runs operator by operator: {reason.reason}.",
            CaptureWarning, file, int(line),
        )  # fmt: skip


def _grad_of(t: Any) -> Handle | None:
    return t.grad._h if isinstance(t.grad, DTensor) else None


def capture(function: Callable[..., Any], *, compile: bool = False) -> Captured:
    """A callable that does what ``function`` does, and after a few calls sends workers one command for each.

    The first calls run as they are, and what they send is recorded; when two of the same kind have sent the same, later
    ones of the kind replay it without running ``function``. Of one kind are calls with equal specs of tensors, equal
    other arguments, and torch in the same modes (gradients, inference, autocast, default dtype). What the function
    reaches beside its arguments (parameters, flags, a learning rate, closures) is compared before each replay, and
    recorded anew when it has changed. Also a decorator, of methods too.

    A complete training step can be captured (``backward()`` and the optimizer's ``step()`` inside, the optimizer made
    with ``capturable=True``). A call whose result needs a derivative runs as it is, and so does what reads values, draws
    random numbers of this process, uploads other plain tensors in each call, or changes Python objects; one
    ``CaptureWarning`` names the line. Effects outside of tensors, such as printing, happen only while recording, and
    a returned loss whose backward has run comes without its spent graph.

    Args:
        function: a function, or a module, of distributed tensors.
        compile: workers compile operators in a row that do not communicate, as ``torch.compile`` does (on CPU workers a C++
            compiler is needed). That takes some seconds, beside the work, and results may differ in the last bits. What
            cannot be compiled runs as without.
    """
    return function if isinstance(function, Captured) else Captured(function, compile)
