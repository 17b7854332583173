"""The value of --mesh, such as ``dp=2,tp=4``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dtorch.cli.errors import InputError

_EXAMPLE = "write name=size for each axis, for example dp=2 or dp=2,tp=4"
_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([0-9]{1,9})")

# More devices than this on one machine is a slip of the keyboard, and starting them would take the machine down.
MAX_DEVICES = 1024


@dataclass(frozen=True)
class MeshShape:
    """Names and sizes of the axes of a mesh, outermost first."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def parse_mesh(text: str) -> MeshShape:
    """The mesh that `text` describes.

    Raises:
        InputError: an axis that is not name=size, a size of 0, a name used twice, or more than MAX_DEVICES devices.
    """
    names: list[str] = []
    sizes: list[int] = []
    for axis in text.split(","):
        match = _AXIS.fullmatch(axis.strip())
        if match is None:
            raise InputError(f"--mesh {text!r}: {axis.strip()!r} is not an axis; {_EXAMPLE}.")
        name, size = match[1], int(match[2])
        if size == 0:
            raise InputError(f"--mesh {text!r}: axis {name!r} has no devices; give it a size of at least 1.")
        if name in names:
            raise InputError(f"--mesh {text!r}: axis {name!r} is there twice; give every axis its own name.")
        names.append(name)
        sizes.append(size)
    shape = MeshShape(tuple(names), tuple(sizes))
    if shape.num_devices > MAX_DEVICES:
        raise InputError(
            f"--mesh {text!r} asks for {shape.num_devices} devices; at most {MAX_DEVICES} can be started here."
        )
    return shape
