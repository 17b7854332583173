"""dtorch: one ordinary PyTorch program, many devices. See README.md.

Names are loaded on first use, so that ``import dtorch`` and the command line start without torch. Whatever is not
defined here falls through to ``torch``: ``import dtorch as torch`` works.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_CORE = {
    "DeviceMesh": "dtorch.core.mesh", "init_device_mesh": "dtorch.core.mesh",
    "Shard": "dtorch.core.placements", "Replicate": "dtorch.core.placements", "Partial": "dtorch.core.placements",
    "DtorchError": "dtorch.core.errors", "PlacementError": "dtorch.core.errors",
    "ImplicitRedistributionError": "dtorch.core.errors", "RemoteError": "dtorch.core.errors",
    "WorkerLostError": "dtorch.core.errors", "SessionClosedError": "dtorch.core.errors",
    "CommError": "dtorch.core.errors", "ControllerLostError": "dtorch.core.errors",
    "ProtocolError": "dtorch.core.errors",
    "LoadError": "dtorch.core.errors", "SaveError": "dtorch.core.errors",
    "TensorFuture": "dtorch.client.future",
    "profile": "dtorch.client.profile",
    "memory_stats": "dtorch.client.memory", "reset_peak_memory_stats": "dtorch.client.memory",
    "empty_cache": "dtorch.client.memory", "memory_summary": "dtorch.client.memory_summary",
    "parallelize": "dtorch.parallel", "describe": "dtorch.parallel", "suggest": "dtorch.parallel.suggest",
    "forecast": "dtorch.parallel.forecast", "assign_layers_to_stages": "dtorch.parallel",
}  # fmt: skip
_API = [
    "CaptureWarning", "DTensor", "FallbackWarning", "Generator", "Graph", "PendingSave", "RandomState", "Tensor",
    "arange", "capture", "connect", "distribute_tensor", "empty", "empty_like", "explain", "eye", "fallbacks", "full",
    "full_like", "init", "linspace", "load", "logspace", "ones", "ones_like", "patch", "plan_stats", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "save", "shutdown", "strict",
    "synchronize", "tensor", "tril_indices", "triu_indices", "workers", "zeros", "zeros_like",
]
_PUBLIC = {**_CORE, **dict.fromkeys(_API, "dtorch.api")}

__all__ = sorted([*_PUBLIC, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}")
    home = _PUBLIC.get(name)
    if home is None and name in _SUBPACKAGES:
        return importlib.import_module(f"dtorch.{name}")
    importlib.import_module("dtorch.api")  # whatever is used first, the device must be known to torch
    value = getattr(importlib.import_module(home or "torch"), name, _MISSING)
    if value is _MISSING:
        raise AttributeError(f"neither 'dtorch' nor 'torch' has an attribute {name!r}")
    if home is not None:
        globals()[name] = value
    return value


_MISSING = object()
_SUBPACKAGES = frozenset({
    "api", "cli", "client", "cluster", "comm", "controller", "core", "launch", "models", "native", "nn", "parallel", "patches",
    "planner", "protocol", "worker",
})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


importlib.import_module("dtorch.autoload").watch()
