"""The parts of the build that pyproject.toml cannot state: where packages lie, and how the native part is compiled."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent
MAPPED = {"dtorch.patches": "patches", "dtorch.models": "models"}  # installed name -> folder in the repository


def load_native_build() -> ModuleType:
    """dtorch/native/build.py by its path: dtorch itself cannot be imported before it and torch are installed."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "dtorch" / "native" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


native_build = load_native_build()


class BuildNative(build_ext):
    """Compiles the native part with build.py, for wheels (build folder) and editable installs (source folder) alike."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1]) / native_build.library_name(TORCH))

    def build_extension(self, ext: Extension) -> None:
        try:
            native_build.compile_library(native_build.find_compiler(), TORCH, Path(self.get_ext_fullpath(ext.name)))
        except (native_build.BuildError, OSError) as error:  # the extension is optional: setuptools warns and goes on
            raise CompileError(f"the native part is left to dtorch's first use: {error}") from error


def native_extensions() -> list[Extension]:
    """The native part where torch is installed already; nothing where it is not, which makes the wheel a pure one."""
    if TORCH is None:
        print("dtorch: torch is not installed yet, so the native part is built at the first use instead.")
        return []
    return [Extension("dtorch.native._ext", ["dtorch/native/ext.cpp"], optional=True)]


def all_packages() -> list[str]:
    """Every package by its installed name."""
    packages = find_namespace_packages(include=["dtorch", "dtorch.*"], exclude=["*__pycache__*"])
    for name, folder in MAPPED.items():
        if (ROOT / folder).is_dir():
            inner = find_namespace_packages(folder, exclude=["*__pycache__*"])
            packages += [name, *(f"{name}.{package}" for package in inner)]
    return packages


TORCH = native_build.find_torch()
setup(
    packages=all_packages(),
    package_dir=MAPPED,
    package_data={"": ["py.typed", "*.cpp", "*.json", "*.yaml", "*.txt"]},
    ext_modules=native_extensions(),
    cmdclass={"build_ext": BuildNative},
)
