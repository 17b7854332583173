"""Compile ext.cpp, the native part, against an installed torch.

Used in two places: by setup.py, which runs this file by its path before dtorch or its dependencies are importable, and
by `dtorch.native.load` at first use. Hence the standard library only, and torch is found without importing it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("ext.cpp")
COMPILE_TIMEOUT_S = 300.0

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    "-std=c++20",  # what torch 2.13 compiles its own extensions with
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-shared",
    "-D_GLIBCXX_USE_CXX11_ABI=1",  # the only string ABI that torch has been published with since 2.7
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),  # the interpreter's symbols
)


class BuildError(Exception):
    """The native part cannot be built; the text says why and what would help."""


@dataclass(frozen=True)
class Torch:
    """An installed torch: its package folder and its full version, such as "2.13.0+cpu"."""

    folder: Path
    version: str


def find_torch() -> Torch | None:
    """The torch of the running interpreter, or None.

    Import paths come first. An isolated build (pip's default) hides the target's packages from them but runs under the
    target's interpreter, so the interpreter's own package folders are looked at next.
    """
    spec = importlib.util.find_spec("torch")  # a top-level name: found, not imported
    folders = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    folders += [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    for folder in folders:
        version_file = folder / "version.py"
        if version_file.is_file() and (folder / "include").is_dir():
            match = re.search(r"^__version__ = '([^']+)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
            if match:
                return Torch(folder, match.group(1))
    return None


def library_name(torch: Torch) -> str:
    """File name of the native part: it names everything the file depends on, so a wrong one is never loaded."""
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:12]
    return f"_ext-{digest}-torch-{torch.version}{sysconfig.get_config_var('EXT_SUFFIX')}"


def cache_folder() -> Path:
    """The user's folder for libraries built at first use: $XDG_CACHE_HOME/dtorch/native, by default under ~/.cache.

    Raises:
        BuildError: the user has no home folder.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise BuildError("there is no home folder to keep the built library in; set XDG_CACHE_HOME.") from error
    return Path(base) / "dtorch" / "native"


def find_compiler() -> list[str]:
    """The command that starts the C++ compiler: $CXX if set (it may hold arguments), else the first one installed.

    Raises:
        BuildError: there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"CXX names the compiler {chosen[0]!r}, which is not installed; install it or unset CXX.")
        return chosen
    for name in _COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise BuildError(f"no C++ compiler ({', '.join(_COMPILERS)}) is installed; install one, or set CXX.")


def compile_library(compiler: list[str], torch: Torch, target: Path) -> None:
    """Compile ext.cpp against `torch` into the file `target`, which appears complete or not at all.

    The library names libc10 and libtorch_cpu without a path: importing torch first is what makes them found.

    Raises:
        BuildError: the compiler failed, or ran longer than COMPILE_TIMEOUT_S seconds.
        OSError: the target's folder cannot be made or written.
    """
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    includes = (torch.folder / "include", Path(sysconfig.get_path("include")))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        output = Path(folder) / target.name
        command = [*compiler, *_FLAGS, *(f"-I{path}" for path in includes), str(SOURCE), "-o", str(output)]
        command += [f"-L{torch.folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        try:
            run = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler[0]} did not finish within {COMPILE_TIMEOUT_S:.0f} s.") from error
        if run.returncode != 0:
            lines = run.stderr.strip().splitlines() or [f"it exited with {run.returncode} and no message"]
            first_error = next((line for line in lines if "error" in line), lines[-1])
            raise BuildError(f"{compiler[0]} failed: {first_error.strip()}\n  command: {shlex.join(command)}")
        output.replace(target)
