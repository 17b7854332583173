"""What the user is told: operators without a rule, refused redistributions, and the explain report."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

from dtorch.client.sites import caller, describe
from dtorch.core.errors import ImplicitRedistributionError
from dtorch.planner.plan import Plan, legal_placements

_counts: Counter[str] = Counter()
_strict = False


class FallbackWarning(UserWarning):
    """An operator without placement rule was gathered and run replicated: right, but slow."""


def note_fallback(func: Any) -> None:
    """Count a fallback; warn once for each operator."""
    name = str(func)
    _counts[name] += 1
    if _counts[name] == 1:
        file, _, line = describe(caller(sys._getframe(1))).rpartition(":")
        warnings.warn_explicit(
            f"{name} has no placement rule for these inputs: they are gathered and it runs replicated on every device.",
            FallbackWarning,
            file,
            int(line),
        )


def fallbacks() -> dict[str, int]:
    """How often each operator ran gathered and replicated for want of a rule, since the program began."""
    return dict(_counts)


class strict:
    """From now on, or within a ``with`` block, hidden redistributions raise ``ImplicitRedistributionError``.

    Args:
        enabled: whether an operator that would redistribute an input unasked is refused.
    """

    def __init__(self, enabled: bool = True) -> None:
        global _strict
        self._before, _strict = _strict, enabled

    def __enter__(self) -> None:
        """The mode is on already."""

    def __exit__(self, *exc: object) -> None:
        global _strict
        _strict = self._before


def is_strict() -> bool:
    """Whether hidden redistributions are refused."""
    return _strict


def refuse_hidden_moves(plan: Plan) -> None:
    """Raise when a plan moves data.

    Raises:
        ImplicitRedistributionError: names operator, input placements and those that need no move.
    """
    if not plan.moves:
        return
    have = ", ".join(str(list(s.placements)) for s in plan.call.specs)
    rows = dict.fromkeys(
        f"{', '.join(map(str, ins))} -> {', '.join(map(str, outs)) or 'nothing'}"
        for ins, outs in legal_placements(plan.call, max(plan.mesh.shape))
    )
    axis = "on each mesh axis" if plan.mesh.ndim > 1 else "here"
    raise ImplicitRedistributionError(
        f"strict: {plan.call.func} on inputs placed {have} would redistribute them. Legal {axis}: {'; or '.join(rows)}. "
        "Call redistribute() first, or leave strict mode."
    )


def refuse_gather(func: Any, placements: list[Any]) -> None:
    """Raise for an operator that would run in the client, on gathered values.

    Raises:
        ImplicitRedistributionError: always.
    """
    have = ", ".join(str(list(p)) for p in placements)
    raise ImplicitRedistributionError(
        f"strict: {func} on inputs placed {have} would gather them in the client. Legal: Replicate() everywhere. "
        "Call redistribute() first, or leave strict mode."
    )
