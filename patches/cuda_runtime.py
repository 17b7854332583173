"""``torch.cuda``: one device that is there, with what torch knows of the mesh behind it."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx

from .base import Patch, Replacement
from .cuda_devices import meant

# Of the CUDA devices in use today most have this or more, and programs choose bfloat16 and the like by it.
_CAPABILITY = (8, 0)


class _Device(contextlib.AbstractContextManager["_Device"]):
    """``torch.cuda.device(0)``: there is no other device to change to."""

    def __init__(self, device: Any = None) -> None:
        meant(device)

    def __exit__(self, *exc: object) -> None:
        pass


class _DeviceOf(_Device):
    """``torch.cuda.device_of(tensor)``."""

    def __init__(self, tensor: Any = None) -> None:
        super().__init__()


def _mesh() -> Any:
    """What torch knows of the mesh: the device module of dtorch."""
    return torch.get_device_module("dtorch")


def _properties(device: Any = None) -> SimpleNamespace:
    meant(device)
    major, minor = _CAPABILITY
    return SimpleNamespace(
        name=_mesh().get_device_name(), major=major, minor=minor, total_memory=_mesh().mem_get_info()[1],
        multi_processor_count=1, max_threads_per_multi_processor=1024, warp_size=32, is_integrated=0,
        is_multi_gpu_board=0, uuid="", L2_cache_size=0, gcnArchName="",
    )  # fmt: skip


def _set_device(device: Any) -> None:
    meant(device)


def _asked(name: str) -> Callable[..., Any]:
    """The function of the mesh's module called so; which device is meant need not be said, there being one."""
    return lambda device=None: getattr(_mesh(), name)()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _seed() -> None:
    _mesh().manual_seed_all(torch.Generator().seed())


_GENERAL: dict[str, Any] = {
    "_initialized": True,  # torch.utils.checkpoint keeps the random state of initialised devices only
    "_is_in_bad_fork": _always(False),
    "_lazy_init": _always(None),
    "can_device_access_peer": _always(False),
    "current_device": _always(0),
    "device": _Device,
    "device_count": _always(1),
    "device_of": _DeviceOf,
    "get_arch_list": _always([]),
    "get_device_capability": _always(_CAPABILITY),
    "get_device_name": _asked("get_device_name"),
    "get_device_properties": _properties,
    "init": _always(None),
    "ipc_collect": _always(None),
    "is_available": _always(True),
    "is_bf16_supported": _always(True),
    "is_current_stream_capturing": _always(False),
    "is_initialized": _always(True),
    "is_tf32_supported": _always(False),
    "set_device": _set_device,
    "synchronize": _asked("synchronize"),
    "utilization": _always(0),
}
_MEMORY: dict[str, Any] = {
    "empty_cache": _asked("empty_cache"),
    "max_memory_allocated": _asked("max_memory_allocated"),
    "max_memory_cached": _asked("max_memory_reserved"),
    "max_memory_reserved": _asked("max_memory_reserved"),
    "mem_get_info": _asked("mem_get_info"),
    "memory_allocated": _asked("memory_allocated"),
    "memory_cached": _asked("memory_reserved"),
    "memory_reserved": _asked("memory_reserved"),
    "memory_snapshot": _always([]),
    "memory_stats": lambda device=None: Counter({"allocated_bytes.all.current": _mesh().memory_allocated()}),
    "memory_summary": lambda device=None, abbreviated=False: f"{_mesh().memory_allocated():,} bytes allocated",
    "reset_accumulated_memory_stats": _always(None),
    "reset_max_memory_allocated": _asked("reset_peak_memory_stats"),
    "reset_max_memory_cached": _asked("reset_peak_memory_stats"),
    "reset_peak_memory_stats": _asked("reset_peak_memory_stats"),
    "set_per_process_memory_fraction": _always(None),
}
_RANDOM: dict[str, Any] = {
    "get_rng_state": _asked("get_rng_state"),
    "get_rng_state_all": lambda: [_mesh().get_rng_state()],
    "initial_seed": _asked("initial_seed"),
    "manual_seed": lambda seed: _mesh().manual_seed_all(seed),
    "manual_seed_all": lambda seed: _mesh().manual_seed_all(seed),
    "seed": _seed,
    "seed_all": _seed,
    "set_rng_state": lambda new_state, device="cuda": _mesh().set_rng_state(new_state),
    "set_rng_state_all": lambda new_states: _mesh().set_rng_state(new_states[0]),
}
_NVTX: dict[str, Any] = {
    "mark": _always(None),
    "range": lambda msg, *args, **kwargs: contextlib.nullcontext(),
    "range_end": _always(None),
    "range_pop": _always(0),
    "range_push": _always(0),
    "range_start": _always(0),
}


def _compile(model: Any = None, **options: Any) -> Any:
    """``torch.compile``, also as a decorator with options: it promises the same results, which eager running gives."""
    return _compile if model is None else model


def _data_parallel(init: Callable[..., None]) -> Callable[..., None]:
    """``torch.nn.DataParallel`` over one device calls the module, without the copies made in C++ for CUDA only."""

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.device_ids = []

    return call


def replace_all(owner: ModuleType | type, values: dict[str, Any]) -> Iterator[Replacement]:
    """A replacement by a fixed value for each name."""
    for name, value in values.items():
        yield Replacement(owner, name, _always(value))


def _replacements() -> Iterator[Replacement]:
    cuda = torch.cuda
    for values in (_GENERAL, _MEMORY, _RANDOM):
        yield from replace_all(cuda, values)
    yield from replace_all(cuda.memory, _MEMORY)
    yield from replace_all(cuda.random, _RANDOM)
    yield from replace_all(cuda.nvtx, _NVTX)
    yield from replace_all(torch.backends.cudnn, {"is_acceptable": _always(False)})
    yield from replace_all(torch, {"compile": _compile})
    yield from replace_all(torch.nn.Module, {"compile": _always(None)})
    yield Replacement(torch.nn.DataParallel, "__init__", _data_parallel)


CUDA_RUNTIME = Patch(
    name="cuda-runtime",
    library="torch",
    versions=((2, 13), (2, 14)),
    reason="torch.cuda of a program without a CUDA device refuses to count, seed, synchronise or measure",
    replacements=_replacements,
)
