"""A plan specialised to the devices of one worker."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dtorch.core.errors import ProtocolError
from dtorch.core.spec import TensorSpec, dense_strides
from dtorch.core.steps import Step
from dtorch.protocol.plans import NAMESPACES, WirePlan
from dtorch.protocol.values import DeviceSlot, GeneratorSlot, Number, Slot
from dtorch.worker import halo, kernels_index, kernels_nn, kernels_sequence  # noqa: F401  (they register kernels)
from dtorch.worker.codegen import compile_simple, function_of
from dtorch.worker.kernels import KERNELS, STAND_INS, Context
from dtorch.worker.random import draw
from dtorch.worker.ring import RINGS, Exchange, Ring, number_of_parts, rounds_of


@dataclass(frozen=True)
class Poison:
    """Stands in the store for a value that a failed operator did not make."""

    serial: int
    text: str


# Namespaces whose operators a module of torch defines when it is imported.
_DEFINED_IN = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
# What operators that read or write files, such as aten::from_file and aten::save, call the argument that names them.
_FILE_ARGUMENTS = frozenset({"filename", "file_name", "path", "file"})


@lru_cache(maxsize=4096)
def resolve(name: str) -> Any:
    """The operator of that name.

    Raises:
        ProtocolError: not an operator, or its namespace is not allowed.
        NotImplementedError: the torch of this worker lacks it.
    """
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace not in NAMESPACES or not packet.isidentifier() or not overload.isidentifier():
        raise ProtocolError(f"{name!r} is not an operator that a worker may run.")
    try:
        if namespace in _DEFINED_IN:
            importlib.import_module(_DEFINED_IN[namespace])
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (AttributeError, ImportError) as e:
        raise NotImplementedError(f"this worker's torch {torch.__version__} has no operator {name!r}.") from e
    if any(argument.name in _FILE_ARGUMENTS for argument in op._schema.arguments):
        raise ProtocolError(f"{name!r} reads or writes a file, which is not an operator that a worker may run.")
    return op


class Program:
    """Runs one plan on every local device.

    Attributes:
        width: operands of the command after its code, plus one.
        takes_id: a first result id follows the scalars.
        absent: no device of this worker takes part.
        at: which local device runs, or ran last.
        flat: so far the raw results were one tensor, or a sequence of just the results.
        simple: the fast path ``(store, commands, index) -> next index``, or ``None``.
    """

    def __init__(self, plan: WirePlan, positions: dict[int, list[int]], device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.here = positions[plan.mesh]
        self.new = [k for k, r in enumerate(plan.results) if r.same is None]
        self.takes_id = bool(self.new)
        self.width = 1 + len(plan.slots) + plan.numbers + self.takes_id + plan.dynamic
        meshes = {s.mesh.id for s in plan.slots} | {plan.mesh}
        meshes |= {step.dst.mesh.id for _, steps in plan.moves for step in steps}
        made = {k: steps[0].src for k, steps in plan.after}
        self.made = [made.get(k, r.spec) for k, r in enumerate(plan.results)]
        self._positions = positions
        self.absent = not any(positions[m] for m in meshes)
        self._missing = ""
        try:
            self.op = resolve(plan.op) if plan.op else None
        except NotImplementedError as e:  # the operator fails, each time; this worker goes on
            self.op, self._missing = None, str(e)
        self.simple: Callable[[dict[int, Any], list[Any], int], int] | None = None
        self.at = 0
        self.flat = True
        self._fixes: dict[int, list[tuple[int, ...] | None]] = {}
        self._contexts: list[Context] = []
        self._targets: list[tuple[Callable[..., Any], list[Any], dict[str, Any]]] = []
        if self.op is not None and not self.absent:
            self._calls = [self._bind(p) for p in self.here]
            special = plan.moves or plan.back or plan.dynamic or plan.random or plan.after or plan.rounds
            if len(self.here) == 1 and not special:
                self.simple = self._make_simple()

    # -- binding arguments ------------------------------------------------------------------------------------------
    def _bind(self, position: int) -> Callable[[Sequence[Any], Sequence[Any], Any], Any]:
        """The call on one device: (tensors, numbers, generator) -> raw result."""
        plan, op = self.plan, self.op
        args, kwargs = list(plan.args), dict(plan.kwargs)
        outputs = tuple(s for s in self.made if s is not None)
        if plan.resize is not None:
            name, index = plan.resize
            spec = plan.results[index].spec
            assert spec is not None
            shape = list(spec.local_shape(position))
            names = [a.name for a in op._schema.arguments]  # type: ignore[union-attr]
            if names.index(name) < len(args):
                args[names.index(name)] = shape
            else:
                kwargs[name] = shape
        target: Callable[..., Any] = op  # type: ignore[assignment]
        function = STAND_INS.get(plan.op)
        if plan.rounds:
            self._contexts.append(Context(op, position, self._wanted(), outputs))

            def function(_: Context, *a: Any, **k: Any) -> Any:
                return a, k  # the ring takes it from here

        elif plan.kernel is not None and not plan.random:
            function = KERNELS.get(plan.kernel)
            if function is None:
                raise ProtocolError(f"no worker kernel is called {plan.kernel!r}.")
        if function is not None:
            wanted = self._wanted()
            context = Context(op, position, wanted, outputs)

            def target(*a: Any, **k: Any) -> Any:
                return function(context, *a, **k)

        if self._makes_nothing(position):
            target = self._nothing(position)
        self._targets.append((target if target is not op else function_of(op), args, kwargs))
        if all(type(a) is Slot and a.index == i for i, a in enumerate(args)) and not kwargs:
            return lambda tensors, numbers, generator: target(*tensors)
        device = self.device

        def fill(value: Any, tensors: Sequence[Any], numbers: Sequence[Any], generator: Any) -> Any:
            kind = type(value)
            if kind is Slot:
                return tensors[value.index]
            if kind is Number:
                return numbers[value.index]
            if kind is list:
                return [fill(v, tensors, numbers, generator) for v in value]
            if kind is DeviceSlot:
                return device
            if kind is GeneratorSlot:
                return generator
            return value

        def call(tensors: Sequence[Any], numbers: Sequence[Any], generator: Any) -> Any:
            return target(
                *[fill(a, tensors, numbers, generator) for a in args],
                **{k: fill(v, tensors, numbers, generator) for k, v in kwargs.items()},
            )

        return call

    def _makes_nothing(self, position: int) -> bool:
        """Whether a device gets only empty pieces of results that have more: operators warn of or refuse empty tensors."""
        plan = self.plan
        if plan.dynamic or plan.random or plan.rounds or not plan.results:
            return False
        if any(r.same is not None or r.alias for r in plan.results):
            return False
        return all(s is not None and s.numel and 0 in s.local_shape(position) for s in self.made)

    def _nothing(self, position: int) -> Callable[..., Any]:
        forms = [(s.local_shape(position), s.dtype) for s in self.made if s is not None]

        def call(*args: Any, **kwargs: Any) -> Any:
            made = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in forms]
            return made[0] if len(made) == 1 else made

        return call

    def sends(self) -> Iterator[Step]:
        """The steps of a ring in the order in which its kernel takes them."""
        rounds = self.plan.rounds
        count = number_of_parts(rounds, self._wanted()) if rounds else 0
        for _ in range(count):
            yield from (step for row in rounds_of(rounds, count) for _, step in row)

    def _wanted(self) -> tuple[TensorSpec, ...]:
        """Specs of the slots after their moves."""
        specs = list(self.plan.slots)
        for slot, steps in self.plan.moves:
            if steps:
                specs[slot] = steps[-1].dst
        return tuple(specs)

    # -- running ----------------------------------------------------------------------------------------------------
    def run(
        self,
        inputs: Sequence[list[torch.Tensor]],
        numbers: list[Any],
        generator: torch.Generator | None,
        exchange: Exchange,
        hold: Callable[[list[torch.Tensor]], None],
    ) -> list[list[torch.Tensor]]:
        """Results of every local device; ``exchange`` runs a redistribution step, ``hold`` counts what is made on the way."""
        plan = self.plan
        if self._missing:
            raise NotImplementedError(self._missing)
        if plan.random:
            assert generator is not None
            raws = draw(plan, self.op, self.here, self._wanted(), inputs, numbers, generator, self._calls)
        else:
            raws = []
            for k, call in enumerate(self._calls):
                self.at = k
                raws.append(call([x[k] for x in inputs], numbers, generator))
                self.flat = self.flat and _compiles(plan, raws[-1])
            if plan.rounds:
                raws = RINGS[plan.kernel or ""](Ring(plan, self._contexts, self._positions, exchange, hold), raws)
        return [self._finish(k, flatten(raw)) for k, raw in enumerate(raws)]

    def _make_simple(self) -> Callable[[dict[int, Any], list[Any], int], int]:
        """The fast path of one local device: no moves, no waiting, results straight into the store.

        The first run checks the results; when they are as predicted, compiled code takes over.
        """
        plan, call = self.plan, self._calls[0]
        n, m, takes_id = len(plan.slots), plan.numbers, self.takes_id

        def run(store: dict[int, Any], commands: list[Any], i: int) -> int:
            tensors = [store[x][0] for x in commands[i : i + n]]
            raw = call(tensors, commands[i + n : i + n + m], None)
            out = self._finish(0, flatten(raw))
            i += n + m
            if takes_id:
                for j, k in enumerate(self.new):
                    store[commands[i] + j] = [out[k]]
            self.flat = self.flat and _compiles(plan, raw)
            if self._fixes.get(0) is _NOTHING and self.flat:
                self.simple = compile_simple(plan, *self._targets[0], self.device, self.new)
            return i + takes_id

        return run

    def _finish(self, k: int, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Check results against the client's prediction (once: they depend on shapes only) and mend their strides."""
        fixes = self._fixes.get(k)
        if fixes is _NOTHING:
            return results
        if fixes is None:
            if self.plan.dynamic:
                return results
            fixes = self._check(self.here[k], results)
            self._fixes[k] = fixes if any(f is not None for f in fixes) else _NOTHING
        return [r if f is None else _with_strides(r, f) for r, f in zip(results, fixes, strict=True)]

    def _check(self, position: int, results: list[torch.Tensor]) -> list[tuple[int, ...] | None]:
        if len(results) != len(self.plan.results):
            raise RuntimeError(f"{self.plan.op} gave {len(results)} tensors, {len(self.plan.results)} were predicted.")
        fixes: list[tuple[int, ...] | None] = []
        wanted = self._wanted()
        for r, predicted, made in zip(results, self.plan.results, self.made, strict=True):
            assert made is not None, "only dynamic plans lack specs"
            spec = made
            if predicted.same is not None and wanted[predicted.same].shape == made.shape:
                spec = wanted[predicted.same]  # the written argument as it was brought here; it goes back afterwards
            shape = spec.local_shape(position)
            if tuple(r.shape) != shape or r.dtype != spec.dtype:
                raise RuntimeError(
                    f"{self.plan.op} gave {tuple(r.shape)} {r.dtype} where {shape} {spec.dtype} was predicted "
                    f"(global shape {spec.shape}, {spec})."
                )
            fixes.append(None if predicted.alias or predicted.same is not None else _restride(r, spec, shape))
        return fixes

    # -- for records ------------------------------------------------------------------------------------------------
    @property
    def is_plain(self) -> bool:
        """Whether running it is one call a device that communicates, waits and draws nothing."""
        plan = self.plan
        special = plan.moves or plan.back or plan.dynamic or plan.random or plan.after or plan.rounds
        return bool(plan.op) and not special

    @property
    def has_kernel(self) -> bool:
        """Whether something of ours runs in place of torch's operator."""
        return self.plan.kernel is not None or self.plan.op in STAND_INS

    @property
    def is_checked(self) -> bool:
        """Whether it has run here on every device, so that it is known how its results must be mended."""
        return self.absent or not self.is_plain or all(k in self._fixes for k in range(len(self.here)))

    def call_on(self, k: int) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """What local device ``k`` calls, and with which arguments; marks stand for those that change."""
        return self._targets[k]

    def mender(self, k: int) -> Callable[[Any], list[torch.Tensor]] | None:
        """What makes the results of ``call_on`` those of the plan, or ``None`` where they are so as they are."""
        if self._fixes[k] is _NOTHING and self.flat:
            return None
        return lambda raw: self._finish(k, flatten(raw))

    def poison(self, store: dict[int, Any], ids: Sequence[int], first_out: int, cause: Poison) -> None:
        """Mark every result, and every written argument among ``ids``, as lost."""
        for k in range(len(self.new)):
            store[first_out + k] = cause
        for result in self.plan.results:
            if ids and result.same is not None:
                store[ids[result.same]] = cause


def _compiles(plan: WirePlan, raw: Any) -> bool:
    """Whether compiled code can take the raw result apart: one tensor, or a flat sequence of just the results."""
    if len(plan.results) == 1:
        return isinstance(raw, torch.Tensor)
    return all(r.same is not None for r in plan.results) or (
        isinstance(raw, (list, tuple)) and all(isinstance(x, torch.Tensor) for x in raw)
    )


_NOTHING: list[tuple[int, ...] | None] = []


def _restride(r: torch.Tensor, spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides that keep the predicted memory order, or ``None`` when the result has them."""
    # A replicated result must have torch's very strides; a piece of one only the same order, without gaps.
    want = spec.stride if shape == spec.shape else dense_strides(shape, spec.shape, spec.stride)
    # Also for dimensions of size one: kernels read the memory format off them.
    return None if r.numel() == 0 or r.stride() == tuple(want) else tuple(want)


def _with_strides(r: torch.Tensor, want: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides; without a copy when only dimensions of size one differ."""
    if all(n <= 1 or a == b for n, a, b in zip(r.shape, r.stride(), want, strict=True)):
        return r.as_strided(r.shape, want)
    return torch.empty_strided(r.shape, want, dtype=r.dtype, device=r.device).copy_(r)


def flatten(raw: Any) -> list[torch.Tensor]:
    """The tensors of a raw result in order."""
    if isinstance(raw, torch.Tensor):
        return [raw]
    out: list[torch.Tensor] = []
    if isinstance(raw, (list, tuple)):
        for x in raw:
            out.extend(flatten(x))
    return out
