"""Sessions whose processes are killed, and what is known of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from tests.transport.processes import is_alive, parent_of, wait_until


class Victims:
    """A session in local mode of two workers, or more, and its processes.

    Attributes:
        graph: the session.
    """

    def __init__(self, **options: Any) -> None:
        self.graph = dtorch.Graph(**{"mode": "local", "workers": 2, "threads": 1, **options})
        self.directory = Path(self.graph.session.link._link._session_dir)  # type: ignore[attr-defined]

    @property
    def pids(self) -> list[int]:
        """Of the workers, by number; waits for all that was asked of them."""
        self.graph.synchronize()
        return [worker.pid for _, worker in sorted(self.graph.session.workers.items())]

    @property
    def controller(self) -> int:
        return int(self.graph.session.link._link._process.pid)  # type: ignore[attr-defined]

    @property
    def template(self) -> int:
        return children(self.controller)[0]

    def kill(self, *indices: int, signum: int = signal.SIGKILL) -> None:
        """Kill the workers of these numbers, once the client knows of those that are there; does not wait for more.

        All at one moment: when one is lost, the others are ended as well, and the client hears of the new ones later.
        """
        session = self.graph.session

        def pids() -> list[int]:
            with session.lock:
                session._drain(0.0)
                return [session.workers[index].pid for index in indices]

        assert wait_until(lambda: all(map(is_alive, pids())))
        for pid in pids():
            os.kill(pid, signum)

    def started(self, before: set[int]) -> list[int]:
        """Workers that have been forked and are not among those before; waits for both."""
        assert wait_until(lambda: len(set(children(self.template)) - before) >= len(before))
        return sorted(set(children(self.template)) - before)


def children(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and parent_of(entry.name) == pid and is_alive(entry.name):
                found.append(int(entry.name))
        except OSError:  # it ended while we looked
            continue
    return found


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """torch sums in another order with several threads; workers have one here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared() -> Iterator[Victims]:
    """One session for many tests: it recovers, after all."""
    found = Victims()
    yield found
    found.graph.close()


@pytest.fixture
def victims(shared: Victims) -> Iterator[Victims]:
    """The shared session, current, with nothing left to do."""
    with shared.graph:
        dtorch.zeros(2, device_mesh=pair()).to_torch()
        shared.graph.synchronize()
        yield shared


@pytest.fixture
def open_victims() -> Iterator[Callable[..., Victims]]:
    """Open sessions with options of their own, and close them after the test."""
    opened: list[Victims] = []

    def open_one(**options: Any) -> Victims:
        opened.append(Victims(**options))
        return opened[-1]

    yield open_one
    for found in opened:
        found.graph.close()


def pair(name: str = "dp") -> dtorch.DeviceMesh:
    """The mesh of both workers."""
    return dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=[name])
