"""What a patch is: named, reversible changes that a library needs to run on dtorch, made at run time.

No source file of a library is copied or edited. A patch replaces attributes of its modules and classes and remembers
what was there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

_MISSING = object()


def default_mesh_device() -> torch.device:
    """The device of the default mesh."""
    return torch.device("dtorch", torch.get_device_module("dtorch").current_device())


def mesh_device(device: Any) -> torch.device | None:
    """The mesh that a device or its name stands for; ``None`` for every other device."""
    if not isinstance(device, (str, torch.device)) or not str(device).startswith("dtorch"):
        return None
    place = torch.device(device)
    return default_mesh_device() if place.index is None else place


class PatchError(RuntimeError):
    """A patch does not fit the installed library."""


@dataclass(frozen=True)
class Replacement:
    """One attribute to replace.

    Attributes:
        owner: the module or class that has it.
        name: the attribute's name.
        make: gives the new value for the old one, perhaps an inherited one; ``None`` where there is none.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """Changes of one library.

    Attributes:
        name: what it is called by, ``library-topic``.
        library: distribution whose attributes are replaced.
        versions: first version it fits and first one it no longer fits, as tuples of numbers.
        reason: what fails without it; one line.
        replacements: gives the changes. Called by ``apply``, so that naming a patch imports no library.
        module: module of the library that a program has imported where the patch matters; by default the whole library.
    """

    name: str
    library: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    reason: str
    replacements: Callable[[], Iterable[Replacement]]
    module: str = ""
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False, compare=False)

    @property
    def version_range(self) -> str:
        """The versions that it fits, in words."""
        return f"from {_text(self.versions[0])} to below {_text(self.versions[1])}"

    @property
    def applied(self) -> bool:
        """Whether it is in force."""
        return bool(self._undo)

    def prepare(self) -> list[Replacement]:
        """Import what it changes; returns the changes.

        Raises:
            PatchError: the installed version is not one that it was made for.
        """
        installed = version(self.library)
        first, beyond = self.versions
        if not first <= _numbers(installed) < beyond:
            raise PatchError(
                f"The patch {self.name!r} is for {self.library} {self.version_range}, and {installed} is installed: "
                "install a version in that range."
            )
        return list(self.replacements())

    def apply(self) -> None:
        """Put it in force; does nothing where it is.

        Raises:
            PatchError: the installed version is not one that it was made for.
        """
        if self.applied:
            return
        for change in self.prepare():
            own = vars(change.owner).get(change.name, _MISSING)
            setattr(change.owner, change.name, change.make(getattr(change.owner, change.name, None)))
            self._undo.append((change.owner, change.name, own))

    def revert(self) -> None:
        """Put back what was there; does nothing where the patch is not in force."""
        while self._undo:
            owner, name, own = self._undo.pop()
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def _numbers(text: str) -> tuple[int, ...]:
    """The release numbers at the start of a version."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match.group().split("."))) if match else ()


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
