"""``"cuda"`` as the name of the mesh: every function of torch that takes a device accepts it, every tensor answers it.

A program that runs under these patches sees one CUDA device, ``cuda:0``, which is ``dtorch:0``, the first mesh of the
session. Devices themselves stay torch's own objects, so ``torch.device("cuda").type == "cuda"`` as always; what is
replaced are the functions that receive one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtorch.client.random import Generator
from dtorch.client.tensor import DTensor
from dtorch.core.torch_private import device_constructors, device_context, script_as

from .base import Patch, Replacement

SHOWN = torch.device("cuda", 0)

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def meant(device: Any) -> Any:
    """The device that a program written for CUDA means; whatever names no CUDA device is returned as it is.

    Args:
        device: a device, its name, its number, or any other argument that may stand in the same place.

    Raises:
        RuntimeError: a CUDA device other than the one there is.
    """
    index: int | None
    if type(device) is str and device.startswith("cuda"):
        index = torch.device(device).index
    elif type(device) is torch.device and device.type == "cuda":
        index = device.index
    elif type(device) is int:
        index = device
    else:
        return device
    if index not in (None, 0, -1):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal. There is no cuda:{index}: a program under `dtorch exec` has one "
            "device, cuda:0, which is the whole mesh."
        )
    return torch.device("dtorch", 0)


def shown(device: torch.device) -> torch.device:
    """What a program written for CUDA is told instead of a device."""
    return SHOWN if device.type == "dtorch" and device.index == 0 else device


def _taking_device(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes its device by name."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = meant(kwargs["device"])
        return func(*args, **kwargs)

    script_as(call, func)
    return call


def _to(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Tensor.to``: its device may come first, as a number too."""

    @functools.wraps(func)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = meant(kwargs["device"])
        elif args:
            args = (meant(args[0]), *args[1:])
        return func(self, *args, **kwargs)

    return to


def _cuda(func: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Tensor.cuda``, and through it ``Module.cuda``."""

    @functools.wraps(func)
    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        return self.to(meant(SHOWN if device is None else device), non_blocking=non_blocking, **kwargs)

    return cuda


def _record_stream(_: Any) -> Callable[..., None]:
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        """Workers free memory in the order of the work: there is nothing to protect."""

    return record_stream


def _showing_device(old: Any) -> property:
    """The property ``device`` of a distributed tensor or a generator."""
    return property(lambda self: shown(old.__get__(self)))


def _is_cuda(_: Any) -> property:
    return property(lambda self: self.device.type == "cuda")


def _new_generator(old: Any) -> Any:
    """``torch.Generator("cuda")``."""
    return staticmethod(lambda cls, device="cpu": old(cls, meant(device)))


def _device_context(func: Callable[..., Any]) -> Callable[..., Any]:
    """``with torch.device("cuda"):`` and ``torch.set_default_device``: they act below the functions replaced here."""
    constructors = device_constructors()

    @functools.wraps(func)
    def call(self: Any, called: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if called in constructors and kwargs.get("device") is None:
            kwargs["device"] = meant(self.device)
        return func(self, called, types, args, kwargs)

    return call


def _current_accelerator(_: Any) -> Callable[..., torch.device]:
    def current_accelerator(check_available: bool = False) -> torch.device:
        """The type of device that the program was written for."""
        return torch.device("cuda")

    return current_accelerator


def _replacements() -> Iterator[Replacement]:
    constructors = device_constructors()
    for module in (torch, torch.fft, torch.nested):
        for name, value in list(vars(module).items()):
            if callable(value) and value in constructors:
                yield Replacement(module, name, _taking_device)
    for name in (*_LIKE, "normal"):
        yield Replacement(torch, name, _taking_device)
    for name in _NEW:
        yield Replacement(torch.Tensor, name, _taking_device)
    yield Replacement(torch.Tensor, "to", _to)
    yield Replacement(torch.Tensor, "cuda", _cuda)
    yield Replacement(torch.Tensor, "record_stream", _record_stream)
    yield Replacement(torch.Tensor, "is_cuda", _is_cuda)
    yield Replacement(DTensor, "device", _showing_device)
    yield Replacement(Generator, "__new__", _new_generator)
    yield Replacement(Generator, "device", _showing_device)
    yield Replacement(device_context, "__torch_function__", _device_context)
    yield Replacement(torch.accelerator, "current_accelerator", _current_accelerator)


def _restore(storage: Any, location: str) -> Any:
    """``torch.load`` asks here where to put what was saved from, or is to be mapped to, a CUDA device."""
    if not CUDA_DEVICES.applied or not location.startswith("cuda"):
        return None
    return torch.serialization.default_restore_location(storage, str(meant(location)))


torch.serialization.register_package(0, lambda storage: None, _restore)

CUDA_DEVICES = Patch(
    name="cuda-devices",
    library="torch",
    versions=((2, 13), (2, 14)),
    reason='programs written for one CUDA device say device="cuda", .cuda(), torch.device("cuda"), map_location="cuda"',
    replacements=_replacements,
)
