"""What the user is told: operators without a rule, refused redistributions, and the explain report."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from dtorch.core.errors import ImplicitRedistributionError
from dtorch.planner.plan import Plan

_counts: Counter[str] = Counter()
_strict: list[bool] = []


class FallbackWarning(UserWarning):
    """An operator without placement rule was gathered and run replicated: right, but slow."""


def note_fallback(func: Any) -> None:
    """Count a fallback; warn once for each operator."""
    name = str(func)
    _counts[name] += 1
    if _counts[name] == 1:
        warnings.warn(
            f"{name} has no placement rule for these inputs: they are gathered and it runs replicated on every device.",
            FallbackWarning,
            stacklevel=4,
        )


def fallbacks() -> dict[str, int]:
    """How often each operator ran gathered and replicated for want of a rule, since the program began."""
    return dict(_counts)


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Within the block, an operator that would redistribute an input unasked raises ``ImplicitRedistributionError``."""
    _strict.append(enabled)
    try:
        yield
    finally:
        _strict.pop()


def is_strict() -> bool:
    """Whether a ``strict`` block is active."""
    return bool(_strict) and _strict[-1]


def refuse_hidden_moves(plan: Plan) -> None:
    """Raise when a plan moves data.

    Raises:
        ImplicitRedistributionError: names operator, input placements and those that need no move.
    """
    if not plan.moves:
        return
    have = "; ".join(str(list(s.placements)) for s in plan.call.specs)
    want = "; ".join(str(list(s.placements)) for s in plan.wanted)
    raise ImplicitRedistributionError(
        f"strict: {plan.call.func} on inputs placed {have} would redistribute them. Legal without communication: {want}. "
        "Call redistribute() first, or leave strict mode."
    )
