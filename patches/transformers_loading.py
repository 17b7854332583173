"""``from_pretrained`` of transformers: its loading threads, and its errors about files."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from dtorch.client.weights import read_header
from dtorch.core.errors import LoadError

from .base import Patch, Replacement


class _InContext:
    """A thread pool whose threads use the session of whoever gives them work."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(contextvars.copy_context().run, job)


def _for_caller(spawn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(spawn)
    def call(pool: ThreadPoolExecutor | None, tensor: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Threads have a current device of their own.
        if device is not None and torch.device(device) == torch.device("dtorch"):
            device = torch.device("dtorch", torch.get_device_module("dtorch").current_device())
        return spawn(pool and _InContext(pool), tensor, device, *args, **kwargs)

    return call


def _with_file_name(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    from safetensors import SafetensorError

    @functools.wraps(safe_open)
    def call(filename: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return safe_open(filename, *args, **kwargs)
        except SafetensorError as e:
            read_header(filename)  # says which tensor is not whole
            raise LoadError(f"{filename} is damaged: {e}.") from e

    return call


def _replacements() -> Iterator[Replacement]:
    from transformers import core_model_loading, modeling_utils

    yield Replacement(core_model_loading, "spawn_materialize", _for_caller)
    yield Replacement(modeling_utils, "safe_open", _with_file_name)


TRANSFORMERS_LOADING = Patch(
    name="transformers-loading",
    library="transformers",
    versions=((5, 24), (5, 25)),
    reason="threads would load to the first mesh instead of the default one, and errors would not name the file",
    replacements=_replacements,
    module="transformers.modeling_utils",
)
