"""``from_pretrained`` of diffusers with a mesh as ``device_map``: weights are converted where they live."""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, Mapping
from typing import Any

import torch

from dtorch.client.tensor import DTensor

from .base import Patch, Replacement


class _ToDevice(dict[str, Any]):
    """A state dict whose tensors go to their device when they are taken, one after the other."""

    def __init__(self, state_dict: Mapping[str, Any], device_of: Callable[[str], Any]) -> None:
        super().__init__(state_dict)
        self._device_of = device_of

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        pairs: Any = ((name, value.to(self._device_of(name))) for name, value in super().items())
        return pairs  # type: ignore[no-any-return]


def _convert_there(load: Callable[..., Any]) -> Callable[..., Any]:
    from diffusers.models.model_loading_utils import _determine_param_device

    @functools.wraps(load)
    def call(model: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        device_map = kwargs.get("device_map")
        if device_map and not kwargs.get("hf_quantizer") and all(map(_is_mesh, device_map.values())):
            state_dict = _ToDevice(state_dict, lambda name: _determine_param_device(name, device_map))
        return load(model, state_dict, *args, **kwargs)

    return call


def _is_mesh(device: Any) -> bool:
    """Whether tensors made on a device are distributed, whatever it is called."""
    return device != "disk" and isinstance(torch.empty(0, device=device), DTensor)


def _replacements() -> Iterator[Replacement]:
    from diffusers.models import model_loading_utils

    yield Replacement(model_loading_utils, "load_model_dict_into_meta", _convert_there)


DIFFUSERS_LOADING = Patch(
    name="diffusers-loading",
    library="diffusers",
    versions=((0, 42), (0, 43)),
    reason="weights of another dtype would be read and converted in the program before they go to the mesh",
    replacements=_replacements,
    module="diffusers.models.model_loading_utils",
)
