"""What a test run leaves behind: no process, no session directory, no thread."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transport.processes import tagged, wait_until

_FOLDER: list[Path | None] = [None]  # whose tests ran last
RUN_TAG = f"DTORCH_TEST_RUN={uuid.uuid4().hex}"


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Marks the processes and session directories of this run, and looks for them when it is over."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # one in a shell's background is told to ignore it
    name, value = RUN_TAG.split("=")
    home = tmp_path_factory.mktemp("sessions")
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    os.environ[name], os.environ["TMPDIR"], tempfile.tempdir = value, str(home), str(home)
    yield
    if "dtorch.api" in sys.modules:
        sys.modules["dtorch.api"].shutdown()
    tempfile.tempdir = before[0]
    if before[1] is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before[1]
    assert wait_until(lambda: not _others()), f"processes left behind: {_describe(_others())}"
    directories = [str(path) for path in home.glob("dtorch-*")]
    assert not directories, f"session directories left behind: {directories}"
    assert wait_until(lambda: not _threads(), 2), f"threads left behind: {_threads()}"


@pytest.fixture(scope="module", autouse=True)
def own_session(request: pytest.FixtureRequest) -> None:
    """The files of a folder may share the default session; the next folder's begin without one, in whatever order."""
    if request.path.parent != _FOLDER[0]:
        _FOLDER[0] = request.path.parent
        if "dtorch.api" in sys.modules:
            sys.modules["dtorch.api"].shutdown()


def _others() -> list[int]:
    return [pid for pid in tagged(RUN_TAG) if pid != os.getpid()]


def _threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dtorch")]


def _describe(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            found.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes().decode().replace(chr(0), ' ')[:200]}")
        except OSError:
            continue  # it ended while we looked
    return found
