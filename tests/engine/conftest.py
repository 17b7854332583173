"""The engine's tests run on the default session; each test says in which modes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch.client import graph
from dtorch.core.config import from_environment
from tests.engine.helpers import OPTIONS
from tests.order import local_last

HERE = Path(__file__).parent
_MANY_MESHES = 40  # of the 64 that a session can use


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are errors here; what needs worker processes comes last, so that they start once."""
    for item in items:
        if HERE in item.path.parents:
            # First, so that what a test says of itself wins; of two the last one is applied first.
            item.add_marker(pytest.mark.filterwarnings("ignore::dtorch.client.notices.FallbackWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)
    local_last(items, HERE)



@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """torch sums in another order with several threads; workers have one here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """The execution mode: inline, unless the test is marked with ``helpers.both_modes`` or ``helpers.local_mode``."""
    wanted: str = getattr(request, "param", "inline")
    start(wanted)
    yield wanted
    if graph._running() is not None:
        dtorch.synchronize()  # a failure that no one has seen belongs to the test that caused it


def start(wanted: str) -> None:
    """Make the default session one of this mode."""
    running, config = graph._running(), from_environment(**OPTIONS[wanted])
    if running is not None and (running.config != config or running.mesh_count > _MANY_MESHES):
        dtorch.shutdown()
    dtorch.init(**OPTIONS[wanted])
