"""Automatic mixed precision for ``"cuda"`` is that of the mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .base import Patch, Replacement

_BY_DEVICE_TYPE = ("get_autocast_dtype", "is_autocast_enabled", "set_autocast_dtype", "set_autocast_enabled")


def _meant(device_type: Any) -> Any:
    return "dtorch" if device_type == "cuda" else device_type


def _autocast_init(func: Callable[..., None]) -> Callable[..., None]:
    """``torch.autocast("cuda")`` and its subclass ``torch.cuda.amp.autocast``."""

    @functools.wraps(func)
    def init(self: Any, device_type: Any, *args: Any, **kwargs: Any) -> None:
        func(self, _meant(device_type), *args, **kwargs)

    return init


def _of_device_type(func: Callable[..., Any]) -> Callable[..., Any]:
    """Functions whose device type comes first, and where it is missing is "cuda"."""

    @functools.wraps(func)
    def call(*args: Any) -> Any:
        if not args or not isinstance(args[0], str):
            args = ("cuda", *args)
        return func(_meant(args[0]), *args[1:])

    return call


def _replacements() -> Iterator[Replacement]:
    yield Replacement(torch.amp.autocast_mode.autocast, "__init__", _autocast_init)
    for name in _BY_DEVICE_TYPE:
        yield Replacement(torch, name, _of_device_type)
    yield Replacement(torch, "get_autocast_gpu_dtype", lambda _: lambda: torch.get_autocast_dtype("dtorch"))
    yield Replacement(
        torch, "set_autocast_gpu_dtype", lambda _: lambda dtype: torch.set_autocast_dtype("dtorch", dtype)
    )


CUDA_AMP = Patch(
    name="cuda-amp",
    library="torch",
    versions=((2, 13), (2, 14)),
    reason='torch.autocast("cuda") would act on CUDA tensors only, of which there are none',
    replacements=_replacements,
)
