"""What of a plan ends up in code that workers compile."""

from __future__ import annotations

from typing import Any

import pytest

from dtorch.core.errors import ProtocolError
from dtorch.protocol.plans import decode_plan
from dtorch.protocol.values import decode


def _plan(keywords: dict[Any, Any]) -> list[Any]:
    return ["aten::add.Tensor", 0, [], 0, [], keywords, [], [], [], None, None, 0, [], []]


@pytest.mark.parametrize("name", ["a=print(1), b", "x)\nimport os", "a b", "", "class", "1", 1, None])
def test_only_names_are_keywords(name: Any) -> None:
    with pytest.raises(ProtocolError, match="no name of an argument"):
        decode_plan(_plan({name: 1}), {}, decode)


def test_names_are_kept() -> None:
    assert decode_plan(_plan({"alpha": 2}), {}, decode).kwargs == {"alpha": 2}
