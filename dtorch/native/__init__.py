"""The native part: the device guard, hooks and generators that PyTorch takes only from C++.

Without it everything runs, but an error raised inside `backward()` ends the process instead of reaching the caller,
and backward works on device index 0 only (autograd starts one thread for each device that the guard counts).

Call `setup` of the loaded module before `dtorch.core.torch_private.register_backend`:
that function keeps a guard and hooks that are there already and registers its Python ones otherwise, so it is called
the same way with and without the native part. In the other order PyTorch refuses the native hooks.

    native = load()
    if native is not None:
        native.setup(device_count)
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.machinery
import importlib.util
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .build import (
    COMPILE_TIMEOUT_S,
    SOURCE,
    BuildError,
    cache_folder,
    compile_library,
    find_compiler,
    find_torch,
    library_name,
)

__all__ = ["load"]

logger = logging.getLogger(__name__)


@functools.cache
def load() -> ModuleType | None:
    """The native module, whose one function is `setup(device_count)`; None, with a logged reason, where there is none.

    Takes the library built when dtorch was installed if it fits this torch and Python, else one from the user's cache,
    else compiles it into the cache (some seconds, once). Blocks meanwhile; raises nothing for what a machine lacks.
    """
    try:
        return _load()
    except (BuildError, ImportError, OSError) as error:
        logger.warning(
            "dtorch runs without its native part, so an error inside backward() ends the process: %s", error
        )
        return None


def _load() -> ModuleType:
    torch = find_torch()
    if torch is None:
        raise BuildError("torch is not installed here, or without its headers.")
    name = library_name(torch)
    installed = SOURCE.with_name(name)
    if installed.is_file():
        try:
            return _import_library(installed)
        except ImportError as error:  # such as a wheel made on a system with a newer C++ library
            logger.info("the installed native part does not load, so one is built here: %s", error)
    cached = cache_folder() / name
    if not cached.is_file():
        with _locked(cached.with_suffix(".lock")):
            if not cached.is_file():  # another process may have built it while this one waited
                compiler = find_compiler()
                logger.warning("building dtorch's native part, once for this Python and torch: %s", cached)
                compile_library(compiler, torch, cached)
    return _import_library(cached)


def _import_library(path: Path) -> ModuleType:
    import torch  # noqa: F401  brings in the libraries that this one is linked to

    name = f"{__name__}._ext"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None:
        raise ImportError(f"Python does not take {path} for an extension module.")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`; the system releases it if this process dies.

    Raises BuildError when another process still holds it after the time a build may take.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process has held {path} for {COMPILE_TIMEOUT_S:.0f} s.") from None
                time.sleep(0.05)
        yield
