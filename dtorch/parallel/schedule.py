"""Pipeline schedules: which stage works on which micro-batch, forward or backward, in which order.

A schedule gives every device of the pipeline a sequence of actions. ``run`` issues a training step by it: each
micro-batch is a thread that stops where the next stage begins, forward and, within autograd, backward; one of them runs
at a time. So the model is any module that ``parallelize`` has spread over ``pp``.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dtorch.core.errors import DtorchError, PlacementError
from dtorch.core.mesh import current_mesh

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Action(NamedTuple):
    """A stage's work on one micro-batch."""

    stage: int
    micro_batch: int
    backward: bool

    def is_first(self, stages: int) -> bool:
        """Whether it needs nothing from another stage, of so many."""
        return self.stage == (stages - 1 if self.backward else 0)

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule(ABC):
    """Orders of actions for a pipeline.

    Attributes:
        devices: coordinates of the mesh's ``pp`` axis.
        micro_batches: how many there are in a step.
        chunks: stages a device has; stage ``s`` is of device ``s % devices``.

    Raises:
        PlacementError: a number below one, or numbers that the schedule cannot serve.
    """

    devices: int
    micro_batches: int
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("devices", "micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise PlacementError(f"{type(self).__name__}: {name}={getattr(self, name)}; use at least 1.")

    @property
    def stages(self) -> int:
        """Number of stages on all devices."""
        return self.devices * self.chunks

    @abstractmethod
    def actions(self, device: int) -> list[Action]:
        """What a device does, in order."""

    def rounds(self, backward_time: int = 2) -> list[tuple[int, Action]]:
        """All actions with the times at which they begin, when a forward takes 1 and a backward ``backward_time``.

        Raises:
            DtorchError: the devices would wait for each other for ever.
        """
        waiting = [self.actions(d)[::-1] for d in range(self.devices)]
        free, ends, found = [0] * self.devices, dict[Action, int](), list[tuple[int, Action]]()
        while any(waiting):
            ready = []
            for d, queue in enumerate(waiting):
                if queue and all(a in ends for a in self._needs(queue[-1])):
                    ready.append((max([free[d], *(ends[a] for a in self._needs(queue[-1]))]), d))
            if not ready:
                raise DtorchError(f"{self}: no device can go on; they wait for {[str(q[-1]) for q in waiting if q]}.")
            start, d = min(ready)
            action = waiting[d].pop()
            free[d] = ends[action] = start + (backward_time if action.backward else 1)
            found.append((start, action))
        return sorted(found, key=lambda entry: entry[0])

    def bubble(self, backward_time: int = 2) -> float:
        """Share of the devices' time in which they wait, from the first action to the last; 0 is best."""
        work = {False: 1, True: backward_time}
        found = self.rounds(backward_time)
        end = max(start + work[a.backward] for start, a in found)
        return 1 - sum(work[a.backward] for _, a in found) / (self.devices * end)

    def _needs(self, a: Action) -> list[Action]:
        if not a.backward:
            return [Action(a.stage - 1, a.micro_batch, False)] if a.stage else []
        if a.stage + 1 < self.stages:
            return [Action(a.stage + 1, a.micro_batch, True)]
        return [Action(a.stage, a.micro_batch, False)]

    def run(self, loss_of: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """One step: forward and backward of every micro-batch; gradients add up as ever.

        Args:
            loss_of: the loss of micro-batch ``i``, a scalar that requires grad. Divide it by their number for a mean.

        Returns:
            The losses, detached, by micro-batch.

        Raises:
            PlacementError: the module has another number of stages than the schedule.
            Exception: what ``loss_of`` raises.
        """
        lanes = [_Lane(loss_of, i) for i in range(self.micro_batches)]
        try:
            for _, group in itertools.groupby(self.rounds(), key=lambda entry: entry[0]):
                actions = [a for _, a in group]
                # Both devices of a transfer take part in it, so what others wait for is handed on before work goes on.
                for a in actions:
                    if not a.is_first(self.stages):
                        lanes[a.micro_batch].go_on()
                for a in actions:
                    lanes[a.micro_batch].go_on()
            if any(lane.turns != 4 * self.stages - 2 or not lane.ended for lane in lanes):
                raise PlacementError(
                    f"{self} has {self.stages} stages, but the module that ran under it has another number: parallelize it "
                    f"over pp={self.devices} with chunks={self.chunks}."
                )
        finally:
            for lane in lanes:
                lane.give_up()
        return [lane.loss for lane in lanes if lane.loss is not None]


class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al., GPipe, 2019)."""

    def actions(self, device: int) -> list[Action]:
        """As ``Schedule.actions``."""
        mine = range(device, self.stages, self.devices)
        forward = [Action(s, i, False) for s in mine for i in range(self.micro_batches)]
        return forward + [Action(s, i, True) for s in reversed(mine) for i in range(self.micro_batches)]


class OneForwardOneBackward(Schedule):
    """Backwards as early as possible, so that few micro-batches are under way (Narayanan et al., PipeDream, 2019)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks != 1:
            raise PlacementError(f"{self}: one stage a device; use Interleaved for several.")

    def actions(self, device: int) -> list[Action]:
        """As ``Schedule.actions``."""
        n = self.micro_batches
        forward = [Action(device, i, False) for i in range(n)]
        return _alternate(forward, [Action(device, i, True) for i in range(n)], self.devices - device - 1)


class Interleaved(Schedule):
    """1F1B with several stages a device, which shortens the bubble (Narayanan et al., Megatron-LM, 2021)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro_batches % self.devices:
            raise PlacementError(f"{self}: the number of micro-batches must be a multiple of the devices.")

    def actions(self, device: int) -> list[Action]:
        """As ``Schedule.actions``: groups of as many micro-batches as devices, chunk by chunk."""
        groups = range(0, self.micro_batches, self.devices)
        order = [(c, g + i) for g in groups for c in range(self.chunks) for i in range(self.devices)]
        turned = [(c, g + i) for g in groups for c in reversed(range(self.chunks)) for i in range(self.devices)]
        forward = [Action(c * self.devices + device, i, False) for c, i in order]
        backward = [Action(c * self.devices + device, i, True) for c, i in turned]
        return _alternate(forward, backward, 2 * (self.devices - device - 1) + (self.chunks - 1) * self.devices)


def _alternate(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> list[Action]:
    """So many forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forward))
    out = list(forward[:ahead])
    for f, b in zip(forward[ahead:], backward, strict=False):
        out += [f, b]
    return out + list(backward[len(forward) - ahead :])


# -- micro-batches as threads that take turns ----------------------------------------------------------------------
_lane: ContextVar[_Lane | None] = ContextVar("dtorch_micro_batch", default=None)


class _GivenUpError(BaseException):
    """Unwinds the thread of a micro-batch whose step has failed."""


class _Lane:
    """One micro-batch on its way through the stages; it runs only within ``go_on``."""

    def __init__(self, loss_of: Callable[[int], torch.Tensor], index: int) -> None:
        self.loss: torch.Tensor | None = None
        self.turns = 0  # that it has used
        self.goes_back = self.ended = False
        self._error: BaseException | None = None
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._gives_up = False
        types = ("cpu", "dtorch")
        self._casts = [(t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t)) for t in types]
        context = copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._work, loss_of, index), name=f"dtorch-micro-batch-{index}", daemon=True
        )
        self._thread.start()

    def go_on(self) -> None:
        """Run up to the next boundary; raises what was raised on the way."""
        if not self.ended:
            self.turns += 1
            self._turn.release()
            self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called within: let the others run."""
        self._back.release()
        self._turn.acquire()
        if self._gives_up:
            raise _GivenUpError

    def give_up(self) -> None:
        """End the thread."""
        if not self.ended:
            self._gives_up = True
            self._turn.release()
        self._thread.join()

    def _work(self, loss_of: Callable[[int], torch.Tensor], index: int) -> None:
        _lane.set(self)
        self._turn.acquire()
        try:
            if self._gives_up:
                return
            with ExitStack() as around:
                mesh = current_mesh()
                if mesh is not None:  # torch's current device is the thread's
                    around.enter_context(mesh)
                for kind, dtype, enabled in self._casts:
                    if enabled:
                        around.enter_context(torch.autocast(kind, dtype))
                loss = loss_of(index)
            self.loss = loss.detach()
            self.pause()
            self.goes_back = True
            loss.backward()
        except _GivenUpError:
            return
        except BaseException as e:  # the thread that runs the schedule raises it
            self._error = e
        finally:
            self.ended = True
            self._back.release()


class _Boundary(torch.autograd.Function):
    """Nothing, but for the pause on the way back."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, lane: _Lane) -> torch.Tensor:
        ctx.lane = lane
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.lane.pause()
        return grad, None


def at_boundary(args: Args, kwargs: Kwargs, move: Callable[[Args, Kwargs], tuple[Args, Kwargs]]) -> tuple[Args, Kwargs]:
    """Where a stage begins: ``move`` its inputs to it. Under a schedule, wait for the turn to, and for that to go on;
    and so on the way back."""
    lane = _lane.get()
    if lane is None or lane.goes_back:  # on the way back activations may be computed again, which is no new forward
        return move(args, kwargs)
    lane.pause()
    args, kwargs = _stopping(*move(*_stopping(args, kwargs, lane)), lane)
    lane.pause()
    return args, kwargs


def _stopping(args: Args, kwargs: Kwargs, lane: _Lane) -> tuple[Args, Kwargs]:
    """The arguments, the first of which that requires grad pauses on the way back."""
    given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            given[name] = _Boundary.apply(value, lane)  # type: ignore[no-untyped-call]
            break
    return tuple(given[i] for i in range(len(args))), {k: given[k] for k in kwargs}
