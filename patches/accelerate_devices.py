"""accelerate on the mesh: it looks for the accelerators that it knows, and falls back to the CPU without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .base import Patch, Replacement, default_mesh_device

# A mesh is one device, and a model that does not fit is an error of its workers. Left a bound, accelerate would put what
# is beyond it on the CPU.
UNBOUNDED = 1 << 60


def on_mesh_alone(get_max_memory: Callable[..., Any]) -> Callable[..., Any]:
    """``get_max_memory``: numbers are those of meshes; where nothing is asked for, there is the default mesh alone."""
    from accelerate.utils.modeling import convert_file_size_to_int

    @functools.wraps(get_max_memory)
    def call(max_memory: dict[Any, Any] | None = None) -> dict[Any, Any]:
        if max_memory is None:
            return {default_mesh_device().index: UNBOUNDED}
        meshes = {}
        for number in sorted(k for k in max_memory if isinstance(k, int)):
            size = max_memory[number]
            meshes[number] = convert_file_size_to_int(size) if isinstance(size, str) else size
        return {**meshes, **get_max_memory({k: v for k, v in max_memory.items() if k not in meshes})}

    return call


def _replacements() -> Iterator[Replacement]:
    import accelerate.utils.modeling
    from accelerate.state import PartialState

    for module in (accelerate.utils, accelerate.utils.modeling):
        yield Replacement(module, "get_max_memory", on_mesh_alone)
    yield Replacement(PartialState, "default_device", lambda _: property(lambda self: default_mesh_device()))


ACCELERATE_DEVICES = Patch(
    name="accelerate-devices",
    library="accelerate",
    versions=((1, 10), (2,)),
    reason='Accelerator() and device_map="auto" would use the CPU',
    replacements=_replacements,
)
