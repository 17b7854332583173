"""safetensors with a mesh as device: its own list of devices is fixed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .base import Patch, Replacement, mesh_device


class _OnMesh:
    """An open file whose tensors go to a mesh as they are taken; the workers read what they can for themselves."""

    def __init__(self, file: Any, device: torch.device) -> None:
        self._file, self._device = file, device

    def __enter__(self) -> _OnMesh:
        self._file.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.__exit__(*exc)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        value: torch.Tensor = self._file.get_tensor(name).to(self._device)
        return value

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: self.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118  (the file is no mapping)

    def get_slice(self, name: str) -> _SliceOnMesh:
        """One tensor, of which a part is to be read."""
        return _SliceOnMesh(self._file.get_slice(name), self._device)


class _SliceOnMesh:
    """A tensor in a file, of which parts are read."""

    def __init__(self, part: Any, device: torch.device) -> None:
        self._part, self._device = part, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        value: torch.Tensor = self._part[index].to(self._device)
        return value


def _open_for_mesh(safe_open: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(safe_open)
    def call(filename: Any, framework: str, device: Any = "cpu", **kwargs: Any) -> Any:
        place = mesh_device(device)
        if place is None:
            return safe_open(filename, framework, device, **kwargs)
        return _OnMesh(safe_open(filename, framework, "cpu", **kwargs), place)

    return call


def _replacements() -> Iterator[Replacement]:
    import safetensors
    import safetensors.torch

    for module in (safetensors, safetensors.torch):
        yield Replacement(module, "safe_open", _open_for_mesh)


SAFETENSORS_LOADING = Patch(
    name="safetensors-loading",
    library="safetensors",
    versions=((0, 8), (1,)),
    reason='load_file(device="dtorch"), load_model and safe_open would refuse the device as invalid',
    replacements=_replacements,
)
