"""Shared by the command line's tests: the demo models, built once, and ways to run the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dtorch.cli.main import app
from dtorch.models import get_model
from dtorch.models.cache import demo_folder

Cli = Callable[..., Result]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the tests' own, empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs `dtorch ARGS...` in this process, in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], prog_name="dtorch")


@pytest.fixture
def command(cache: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `dtorch ARGS...` as a process of its own, in a folder of the test's own."""

    def start(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dtorch.cli", *map(str, args)],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,  # tests look at the exit code
        )

    return start


@pytest.fixture(scope="session")
def demo(cache: Path) -> Callable[[str], Path]:
    """The demo folder of the model called so."""

    def build(name: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            return demo_folder(get_model(name, "text-to-image"))

    return build


@pytest.fixture
def model_copy(demo: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the demo of sd3 that the test may damage."""
    return Path(shutil.copytree(demo("sd3"), tmp_path / "model"))
