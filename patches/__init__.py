"""Run-time patches of third-party libraries, one module for each topic of a library.

    dtorch.patches.apply()                       # all that the installed libraries need to choose and fill the mesh
    dtorch.patches.apply("safetensors-loading")  # this one
    dtorch.patches.revert()

Most of what the libraries do needs none of them. Those of ``cuda-*`` make torch report a CUDA device; they are for
programs written for one, which ``dtorch exec`` runs, and are applied by name only. With them in force the libraries
choose ``"cuda"`` by themselves, so ``dtorch exec`` adds only those of ``*-loading``.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from importlib.metadata import PackageNotFoundError, version

from dtorch.core.imports import after_import

from .base import Patch, PatchError

__all__ = ["Patch", "PatchError", "apply", "apply_for_cuda_programs", "available", "revert"]

# Module -> name of the patch in it, in the order in which they are applied.
_LIBRARIES = {
    "safetensors_loading": "SAFETENSORS_LOADING",
    "accelerate_devices": "ACCELERATE_DEVICES",
    "transformers_loading": "TRANSFORMERS_LOADING",
    "transformers_devices": "TRANSFORMERS_DEVICES",
    "diffusers_loading": "DIFFUSERS_LOADING",
    "diffusers_devices": "DIFFUSERS_DEVICES",
}
_CUDA = {
    "cuda_devices": "CUDA_DEVICES",
    "cuda_runtime": "CUDA_RUNTIME",
    "cuda_streams": "CUDA_STREAMS",
    "cuda_amp": "CUDA_AMP",
}


def available() -> list[Patch]:
    """Every patch there is; ``.applied`` tells which are in force. Imports no library but torch."""
    return [_load(module, name) for module, name in {**_LIBRARIES, **_CUDA}.items()]


def apply(*names: str) -> list[Patch]:
    """Put patches in force, and import the libraries that they change.

    Args:
        names: which; by default those of every installed library, without the ``cuda-*`` ones. One that does not fit the
            installed version is then left out, with a warning.

    Returns:
        The patches in force because of this call, also those that were so before.

    Raises:
        PatchError: a name that no patch has, or a named patch that does not fit the installed version.
    """
    if names:
        chosen = [_find(name) for name in names]
        for patch in chosen:
            patch.prepare()
    else:
        chosen = [patch for patch in map(_load, _LIBRARIES, _LIBRARIES.values()) if _installed(patch.library)]
    return _apply_fitting(chosen)


def apply_for_cuda_programs() -> None:
    """Put in force what a program written for a CUDA device needs, and imports no library that it does not import.

    A library's loading is changed once the program has imported the library; where the installed version does not fit,
    it is left as it is, with a warning.
    """
    apply(*(patch.name for patch in map(_load, _CUDA, _CUDA.values())))
    for patch in map(_load, _LIBRARIES, _LIBRARIES.values()):
        if patch.name.endswith("-loading"):
            after_import(patch.module or patch.library, functools.partial(_apply_fitting, [patch]))


def revert(*names: str) -> None:
    """Take patches back, the last applied first; by default all that are in force.

    Raises:
        PatchError: a name that no patch has.
    """
    for patch in reversed([_find(name) for name in names] if names else available()):
        patch.revert()


def _apply_fitting(chosen: list[Patch]) -> list[Patch]:
    """Put those in force that fit the installed versions, and warn of the others; returns the former."""
    fitting = []
    for patch in chosen:  # all is imported before anything is changed: modules copy functions of others into themselves
        try:
            patch.prepare()
        except PatchError as e:
            warnings.warn(str(e), stacklevel=3)
        else:
            fitting.append(patch)
    for patch in fitting:
        patch.apply()
    return fitting


def _load(module: str, name: str) -> Patch:
    patch: Patch = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return patch


def _find(name: str) -> Patch:
    found = {patch.name: patch for patch in available()}
    if name not in found:
        raise PatchError(f"There is no patch {name!r}; there are {', '.join(sorted(found))}.")
    return found[name]


def _installed(library: str) -> bool:
    try:
        version(library)
    except PackageNotFoundError:
        return False
    return True
