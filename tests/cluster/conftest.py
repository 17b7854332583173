"""A pool on this machine: a controller and two machines of two workers each, as people start them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtorch
from dtorch.cluster import keys, tokens
from tests.engine.conftest import one_thread
from tests.transport.processes import tagged, wait_until

__all__ = ["one_thread"]

ROOT = Path(__file__).parents[2]


class Pool:
    """The processes of a pool, and what a client of it needs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, folder / "keys"
        self.roots, self.scratch, self.temporary = folder / "roots", folder / "scratch", folder / "tmp"
        for path in (self.roots, self.scratch, self.temporary):
            path.mkdir()
        keys.make(self.keys)
        self.token = tokens.issue(self.keys, 3600, "tests")
        self.gate = self.run("controller", "--listen", "tcp://127.0.0.1:*", "--message", "64M", "--sessions", "6")
        self.address = re.search(r"tcp://\S+", self.gate.stdout.readline())[0]
        self.agents: list[subprocess.Popen[str]] = []

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Start a program of a pool."""
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "dtorch.cli", *command, "--keys", str(self.keys)],
            env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def grow(self, count: int) -> None:
        """Have so many machines in the pool."""
        self.agents = [a for a in self.agents if a.poll() is None]
        new = [
            self.run(
                "worker",
                "--controller",
                self.address,
                "--devices",
                "cpu:2",
                "--file-roots",
                str(self.roots),
                "--scratch",
                str(self.scratch),
                "--tensors",
                "2000",
                "--memory",
                "16G",
            )
            for _ in range(count - len(self.agents))
        ]
        for agent in new:
            assert "joined" in agent.stdout.readline()
        self.agents += new

    def connect(self, **options: object) -> None:
        """Make the pool the default session of this process."""
        dtorch.shutdown()
        dtorch.connect(**{"address": self.address, "token": self.token, "keys": str(self.keys), **options})

    def controllers(self) -> list[int]:
        """Pids of the controllers of its sessions."""
        found = []
        for pid in tagged(f"TMPDIR={self.temporary}"):
            with contextlib.suppress(OSError):  # it ends while we look
                if b"dtorch.controller" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def close(self) -> None:
        """End it; nothing may be left."""
        for process in (*self.agents, self.gate):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (*self.agents, self.gate):
            process.wait(timeout=20)
            process.stdout.close()
        assert wait_until(lambda: not tagged(f"TMPDIR={self.temporary}")), tagged(f"TMPDIR={self.temporary}")
        assert not list(self.scratch.iterdir())


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    dtorch.shutdown()
    pool.close()


@pytest.fixture
def pool(running: Pool) -> Iterator[Pool]:
    running.grow(2)
    yield running
    dtorch.shutdown()
    assert wait_until(lambda: not running.controllers()), "a session's controller is left"
