"""The plans of a session: by exact call, and on a second level for calls that differ in sizes."""

from __future__ import annotations

from typing import Any

import torch

from dtorch.planner.call import Call
from dtorch.planner.lines import Family, outline
from dtorch.planner.plan import Plan


class Plans(dict[Any, Any]):
    """Call key -> plan made ready.

    Attributes:
        derived: how many of them were not planned but told from plans of other sizes.
        reducing: call key -> plan that begins by reducing arguments, after which the call has another key.
    """

    def __init__(self) -> None:
        super().__init__()
        self.derived = 0
        self.reducing: dict[Any, Plan] = {}
        self._families: dict[Any, Family] = {}

    @property
    def planned(self) -> int:
        """How many were planned."""
        return len(self) + len(self.reducing) - self.derived

    def family(self, info: Any, call: Call) -> tuple[Family, tuple[int, ...]]:
        """The calls that are like this one but for their numbers, and the numbers of this one.

        Args:
            info: the operator's, see ``client.dispatch``.
            call: the call.
        """
        form, numbers = outline(call, info.free)
        key = (info, torch.get_default_dtype(), form)
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = Family(info.free)
        return family, numbers
