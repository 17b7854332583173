"""Where in the user's program an operator was issued: kept as two cheap values, spelled out only on failure."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

# Code object, instruction offset, and perhaps the thread. Where a record ran, the sites of its operators come fourth.
Site = tuple[Any, ...]

_PATCHES = find_spec("dtorch.patches")  # in an editable installation its folder lies beside dtorch's
_INSIDE = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    *((_PATCHES.submodule_search_locations or ()) if _PATCHES else ()),
    "<",
    str(Path(sys.modules["contextlib"].__file__ or "")),
)
_USER: dict[CodeType, bool] = {}


class Sites(deque[Site]):
    """The sites of operators in flight, in order; with their threads once a second one has been seen."""

    __slots__ = ("log",)

    log: Callable[[Site, list[Site] | None], None]

    def append_replay(self, site: Site, within: list[Site]) -> None:
        """Append the site at which a record runs whose operators were issued at these sites."""
        deque.append(self, (*site, threading.get_ident() if self.notes_threads else None, within))

    def note_threads(self) -> None:
        """From now on the thread that issues an operator is kept too."""
        if not self.notes_threads:
            self.__class__ = _SitesOfThreads  # the same object: threads are appending to it

    def note_no_threads(self) -> None:
        """As before ``note_threads``, or ``note_in``."""
        self.__class__ = Sites

    def note_in(self, log: Callable[[Site, list[Site] | None], None]) -> None:
        """From now on tell ``log`` each site, with those of the operators where a record runs; threads are kept too."""
        self.log = log
        self.__class__ = _LoggedSites

    @property
    def notes_threads(self) -> bool:
        """Whether threads are noted."""
        return isinstance(self, _SitesOfThreads)


class _SitesOfThreads(Sites):
    __slots__ = ()

    def append(self, site: Site) -> None:
        super().append((*site, threading.get_ident()))


class _LoggedSites(_SitesOfThreads):
    __slots__ = ()

    def append(self, site: Site) -> None:
        deque.append(self, (*site, threading.get_ident()))
        self.log(site, None)

    def append_replay(self, site: Site, within: list[Site]) -> None:
        super().append_replay(site, within)
        self.log(site, within)


def thread_of(site: Site | None) -> int | None:
    """The thread that issued an operator, where it is known."""
    return site[2] if site is not None and len(site) > 2 else None


def site_within(site: Site, step: int) -> Site:
    """The site of an operator of the record that ran at this site."""
    _, _, thread, within = site
    return (*within[step][:2], thread)


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
    code, offset = site[:2]
    line = code.co_firstlineno
    for start, stop, number in code.co_lines():
        if start <= offset < stop and number is not None:
            line = number
    return f"{code.co_filename}:{line}"
