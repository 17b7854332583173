"""Where in the user's program an operator was issued: kept as two cheap values, spelled out only on failure."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

Site = tuple[CodeType, int]  # code object and instruction offset

_INSIDE = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    "<",
    str(Path(sys.modules["contextlib"].__file__ or "")),
)
_USER: dict[CodeType, bool] = {}


def caller(frame: FrameType) -> Site:
    """The nearest frame at or above this one that belongs neither to torch nor to dtorch."""
    found: FrameType | None = frame
    known = _USER
    while found is not None:
        code = found.f_code
        user = known.get(code)
        if user is None:
            user = known[code] = not code.co_filename.startswith(_INSIDE)
        if user:
            return code, found.f_lasti
        frame, found = found, found.f_back
    return frame.f_code, frame.f_lasti


def describe(site: Site) -> str:
    """``file:line``."""
    code, offset = site
    line = code.co_firstlineno
    for start, stop, number in code.co_lines():
        if start <= offset < stop and number is not None:
            line = number
    return f"{code.co_filename}:{line}"
