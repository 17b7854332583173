"""An operator call as the planner sees it: tensors replaced by their specs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from dtorch.core.spec import TensorSpec
from dtorch.core.torch_private import OpOverload


@cache
def base_name(func: OpOverload) -> str:
    """Name without overload and without the in-place mark: ``aten.add_.Tensor`` -> ``aten.add``."""
    namespace, _, name = func._schema.name.partition("::")
    if name.endswith("_") and not name.endswith("__"):
        name = name[:-1]
    return f"{namespace}.{name}"


@cache
def parameters(func: OpOverload) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each schema argument, in order."""
    return tuple((a.name, a.default_value if a.has_default_value() else None) for a in func._schema.arguments)


@cache
def mutated_names(func: OpOverload) -> frozenset[str]:
    """Names of the arguments that the operator writes."""
    return frozenset(a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def is_view(func: OpOverload) -> bool:
    """Whether a result may be a view of an argument (and none is a written argument)."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


class Call:
    """Operator, arguments with specs for tensors, and the specs in slot order (positional first, then keywords).

    Attributes:
        func: the operator.
        args, kwargs: the arguments; every tensor is a ``TensorSpec``.
        specs: all tensor arguments in order of appearance; a slot is an index into this list.
        slots: for each argument name, its slot, list of slots (``None`` for missing entries), or absent.
    """

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = base_name(func)
        self.specs: list[TensorSpec] = []
        self.slots: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        names = parameters(func)
        for (name, _), value in zip(names, args, strict=False):
            self._add(name, value)
        for name, value in kwargs.items():
            self._add(name, value)
        for name, default in names[len(args) :]:
            self._values.setdefault(name, default)

    def _add(self, name: str, value: Any) -> None:
        self._values[name] = value
        if isinstance(value, TensorSpec):
            self.slots[name] = len(self.specs)
            self.specs.append(value)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, TensorSpec) for v in value):
            found: list[int | None] = []
            for v in value:
                found.append(len(self.specs) if isinstance(v, TensorSpec) else None)
                if isinstance(v, TensorSpec):
                    self.specs.append(v)
            self.slots[name] = found

    def __getitem__(self, name: str) -> Any:
        """Value of an argument by its schema name; the default when it was not given."""
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Value of an argument, or ``default`` where the operator has no such argument."""
        return self._values.get(name, default)

    def spec(self, name: str) -> TensorSpec:
        """Spec of a tensor argument."""
        value = self._values[name]
        assert isinstance(value, TensorSpec), f"{self.func}: argument {name} is no tensor"
        return value

    def written_slots(self) -> Iterator[int]:
        """Slots of the tensors that the operator writes."""
        for name in mutated_names(self.func):
            slot = self.slots.get(name)
            if isinstance(slot, int):
                yield slot
            elif slot is not None:
                yield from (s for s in slot if s is not None)

    @property
    def first(self) -> TensorSpec:
        """Spec of the first tensor argument."""
        return self.specs[0]


def draws(call: Call) -> bool:
    """Whether the call draws random numbers: attention and recurrent networks without dropout, and rrelu outside of
    training, do not."""
    if torch.Tag.nondeterministic_seeded not in call.func.tags:
        return False
    if call.get("dropout") is not None and call.get("train") is not None:  # a recurrent network
        return bool(call["dropout"] and call["train"])
    return call.get("dropout_p") != 0 and not (call.name == "aten.rrelu_with_noise" and not call["training"])
