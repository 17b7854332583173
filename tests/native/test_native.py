"""The native part builds, loads, and lets errors inside backward() reach the caller as ordinary Python exceptions.

What is tested ends the process where it is wrong, and a backend registers once in a process, so each scenario runs in a
process of its own: this file, started with the scenario's name. The package under test is loaded by its path: the
rest of dtorch would register its own backend.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.checkpoint import checkpoint

NATIVE = Path(__file__).resolve().parents[2] / "dtorch" / "native"
NUM_DEVICES = 64


# --- in the scenario's process ---------------------------------------------------------------------------


class BoomError(Exception):
    """Raised by the scenarios; no library knows it, so whoever catches it got the original."""


class Wrapped(torch.Tensor):
    """A tensor on device "dtorch" that keeps its values in a CPU tensor and fails on the operator named `fail_on`."""

    local: torch.Tensor
    fail_on: str | None = None

    @staticmethod
    def __new__(cls, local: torch.Tensor, device: torch.device) -> Wrapped:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, local.shape, dtype=local.dtype, device=device, strides=local.stride()
        )
        wrapper.local = local
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == Wrapped.fail_on:
            raise BoomError(Wrapped.fail_on)
        device = next(arg.device for arg in args if isinstance(arg, Wrapped))
        local_args = [arg.local if isinstance(arg, Wrapped) else arg for arg in args]
        local_kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        return cls(func(*local_args, **local_kwargs), device)


class DeviceModule:
    """What torch.dtorch has to offer for autograd and checkpointing."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return NUM_DEVICES

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def load_package(folder: Path) -> ModuleType:
    """The package dtorch.native in `folder`, without the rest of dtorch."""
    spec = importlib.util.spec_from_file_location(
        "native", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, f"no package in {folder}"
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module
    spec.loader.exec_module(module)
    return module


def register() -> ModuleType:
    """Register the backend as dtorch does: the native part first, then PyTorch's setup for Python backends."""
    native = load_package(NATIVE).load()
    assert native is not None, "the native part was not built"
    native.setup(NUM_DEVICES)
    _setup_privateuseone_for_python_backend("dtorch", DeviceModule())
    return native


@contextlib.contextmanager
def failing(operator: str) -> Iterator[None]:
    Wrapped.fail_on = operator
    try:
        yield
    finally:
        Wrapped.fail_on = None


def raise_boom(*_: Any) -> Any:
    raise BoomError("raised by the user's code")


def leaf(index: int) -> torch.Tensor:
    return Wrapped(torch.full((3,), 0.5), torch.device("dtorch", index)).requires_grad_()


def gradient(index: int) -> torch.Tensor:
    return Wrapped(torch.ones(3), torch.device("dtorch", index))


def error_in_dispatch(index: int) -> None:
    output = leaf(index).sin()
    with failing("cos"):  # the derivative of sin
        output.backward(gradient(index))


def error_in_tensor_hook(index: int) -> None:
    middle = leaf(index).sin()
    middle.register_hook(raise_boom)
    middle.sin().backward(gradient(index))


def error_in_accumulate_hook(index: int) -> None:
    x = leaf(index)
    x.register_post_accumulate_grad_hook(raise_boom)
    x.sin().backward(gradient(index))


def error_in_custom_function(index: int) -> None:
    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        backward = staticmethod(raise_boom)

    Identity.apply(leaf(index)).sin().backward(gradient(index))


def checkpointed(index: int, use_reentrant: bool, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return checkpoint(function, leaf(index), use_reentrant=use_reentrant, preserve_rng_state=False)


def error_in_recomputed_operator(index: int, use_reentrant: bool) -> None:
    output = checkpointed(index, use_reentrant, lambda x: x.sin().exp())
    with failing("exp"):
        output.backward(gradient(index))


def error_in_recomputed_user_code(index: int, use_reentrant: bool) -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(index)
        return raise_boom() if len(calls) > 1 else x.sin().exp()

    checkpointed(index, use_reentrant, function).backward(gradient(index))


def error_in_backward_of_recomputed(index: int, use_reentrant: bool) -> None:
    output = checkpointed(index, use_reentrant, lambda x: x.exp().sin())
    with failing("cos"):
        output.backward(gradient(index))


ERRORS: dict[str, Callable[[int], None]] = {
    "dispatch": error_in_dispatch,
    "tensor_hook": error_in_tensor_hook,
    "accumulate_hook": error_in_accumulate_hook,
    "custom_function": error_in_custom_function,
    "recomputed_operator": lambda index: error_in_recomputed_operator(index, False),
    "recomputed_operator_reentrant": lambda index: error_in_recomputed_operator(index, True),
    "recomputed_user_code": lambda index: error_in_recomputed_user_code(index, False),
    "recomputed_user_code_reentrant": lambda index: error_in_recomputed_user_code(index, True),
    "backward_of_recomputed": lambda index: error_in_backward_of_recomputed(index, False),
    "backward_of_recomputed_reentrant": lambda index: error_in_backward_of_recomputed(index, True),
}


def run_errors(threads: bool) -> None:
    """Every scenario's error arrives, on devices 0 to 3, and backward works afterwards.

    `threads` has autograd run each device on a thread of its own, as PyTorch does by default. dtorch runs all on the
    caller's thread, and this is one reason: after an error such a thread may still be dropping the failed graph, and if
    the interpreter ends at that moment CPython kills it half-way, which ends the process with SIGABRT.
    """
    register()
    for name, scenario in ERRORS.items():
        for index in range(4):
            print(f"{name} on device {index}", flush=True)
            with torch.autograd.set_multithreading_enabled(threads):
                with pytest.raises(BoomError):
                    scenario(index)
                x = leaf(index)
                x.sin().backward(gradient(index))
                assert isinstance(x.grad, Wrapped) and torch.equal(x.grad.local, torch.full((3,), 0.5).cos())
    if threads:
        os._exit(0)


def run_hooks() -> None:
    """Devices, generators and pinned memory, through PyTorch's own functions."""
    register()
    assert torch.accelerator.current_accelerator() == torch.device("dtorch")
    assert torch.accelerator.device_count() == NUM_DEVICES
    torch.accelerator.set_device_index(3)
    assert torch.accelerator.current_device_index() == 3
    with pytest.raises(IndexError, match="no device dtorch:64: the last one is dtorch:63"):
        torch.accelerator.set_device_index(NUM_DEVICES)
    torch.Event("dtorch").record()

    generator = torch.Generator("dtorch:2").manual_seed(5)
    assert generator.device == torch.device("dtorch:2")
    assert torch.Generator("dtorch").device == torch.device("dtorch:3")
    assert torch.Generator("dtorch").initial_seed() == torch.Generator().initial_seed()
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(5).get_state())
    copy = generator.clone_state()
    assert copy.device == generator.device and torch.equal(copy.get_state(), generator.get_state())
    with pytest.raises(IndexError, match="no device dtorch:64"):
        torch.Generator(f"dtorch:{NUM_DEVICES}")

    assert torch.equal(torch.ones(3).pin_memory(), torch.ones(3))


def run_setup() -> None:
    """setup() refuses what cannot work, and may be repeated."""
    native = register()
    native.setup(NUM_DEVICES)
    with pytest.raises(RuntimeError, match="device count is 64 for the rest of this process: it cannot become 4"):
        native.setup(4)
    for count in (0, -1, 128):
        with pytest.raises(ValueError, match=f"from 1 to 127, but is {count}"):
            native.setup(count)
    with pytest.raises(TypeError):
        native.setup("many")


def run_second_backend() -> None:
    """Another PrivateUse1 backend came first: an error that says so."""
    _setup_privateuseone_for_python_backend("other", DeviceModule())
    native = load_package(NATIVE).load()
    assert native is not None, "the native part was not built"
    with pytest.raises(RuntimeError, match=r"PyTorch refused the dtorch backend: .* registered once"):
        native.setup(NUM_DEVICES)


SCENARIOS: dict[str, Callable[[], None]] = {
    "errors_on_the_callers_thread": lambda: run_errors(threads=False),
    "errors_on_device_threads": lambda: run_errors(threads=True),
    "hooks": run_hooks,
    "setup": run_setup,
    "second_backend": run_second_backend,
}


def run_load(folder: str) -> None:
    """Print what load() of the package in `folder` gives: the library's path or None. Its log goes to stderr."""
    logging.basicConfig(level=logging.INFO)
    module = load_package(Path(folder)).load()
    print(module and module.__file__)


# --- the tests -------------------------------------------------------------------------------------------


def start(cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Standard output and error of a process that has to end well, within two minutes."""
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, f"exit status {process.returncode}:\n{out}\n{err}"
    return out.strip(), err


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where these tests build the native part if the installed one does not fit."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of dtorch.native as it is installed before torch: with no library beside it."""
    return Path(shutil.copytree(NATIVE, tmp_path / "native", ignore=shutil.ignore_patterns("_ext-*", "__pycache__")))


@pytest.mark.parametrize("name", SCENARIOS)
def test_backend(name: str, cache: Path) -> None:
    finish(start(cache, name))


def test_first_use_builds_into_the_cache_once(package: Path, tmp_path: Path) -> None:
    processes = [start(tmp_path, "load", str(package)) for _ in range(3)]
    outputs = [finish(process) for process in processes]
    libraries = {out for out, _ in outputs}
    assert len(libraries) == 1 and Path(libraries.pop()).is_relative_to(tmp_path / "dtorch" / "native")
    assert sum(err.count("building dtorch's native part") for _, err in outputs) == 1
    assert not list((tmp_path / "dtorch" / "native").glob(".build-*"))

    again, err = finish(start(tmp_path, "load", str(package), CXX="no-such-compiler"))
    assert again == outputs[0][0] and "native part" not in err


def test_library_beside_the_package_comes_first(package: Path, tmp_path: Path) -> None:
    built, _ = finish(start(tmp_path / "elsewhere", "load", str(package)))
    installed = shutil.copy(built, package)
    out, _ = finish(start(tmp_path, "load", str(package), CXX="no-such-compiler"))
    assert out == str(installed)

    Path(installed).write_bytes(b"not a library")
    out, err = finish(start(tmp_path, "load", str(package)))
    assert Path(out).is_relative_to(tmp_path / "dtorch") and "installed native part does not load" in err


def test_changed_source_is_another_library(package: Path, tmp_path: Path) -> None:
    before, _ = finish(start(tmp_path, "load", str(package)))
    with (package / "ext.cpp").open("a") as file:
        file.write("// changed\n")
    after, _ = finish(start(tmp_path, "load", str(package)))
    assert after not in (before, "None")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "CXX names the compiler 'no-such-compiler', which is not installed"),
        ({"CXX": "", "PATH": "/no/such/folder"}, "no C++ compiler (c++, g++, clang++) is installed"),
        ({"CXX": "c++ -include no_such_header.h"}, "no_such_header.h"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "/dev/null"),
    ],
)
def test_missing_native_part_is_a_logged_reason(
    environment: dict[str, str], reason: str, package: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "load", str(package), **environment)
    out, err = finish(process)
    assert out == "None"
    assert "WARNING:native:dtorch runs without its native part" in err and reason in err


if __name__ == "__main__":
    if sys.argv[1] == "load":
        run_load(sys.argv[2])
    else:
        SCENARIOS[sys.argv[1]]()
