"""Each test runs on a mesh of one device; client and worker compute with one thread, as equal bits need."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch.client import graph


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What the libraries warn of is theirs."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Without the library's notices, and with one computing thread in this process."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    dtorch.shutdown()  # the next module may want other workers


@pytest.fixture(autouse=True)
def mesh(request: pytest.FixtureRequest) -> Iterator[dtorch.DeviceMesh]:
    """A mesh of one device, the default one; ``param`` is the mode."""
    mode = getattr(request, "param", "inline")
    running = graph._running()
    if running is not None and (running.config.mode != mode or running.mesh_count > 40):
        dtorch.shutdown()
    dtorch.init(mode=mode, workers=1, threads=1) if mode == "local" else dtorch.init(mode=mode)
    with torch.no_grad(), dtorch.init_device_mesh("cpu", (1,)) as made:
        yield made
    dtorch.synchronize()  # a failure that no one has seen belongs to the test that caused it


@pytest.fixture
def reads() -> Callable[[], int]:
    """Counts the synchronising reads so far."""
    return lambda: graph.current_session().reads
