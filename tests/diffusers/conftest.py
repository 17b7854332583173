"""Each test runs on a mesh of one device; client and worker compute with one thread, as equal bits need."""

from __future__ import annotations

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
    """Without the libraries' notices, and with one computing thread in this process."""
    import diffusers.utils.logging
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reads(request: pytest.FixtureRequest) -> Iterator[Callable[[], int]]:
    """Counts the synchronising reads of a one-device mesh, which is the default one; ``param`` is the mode."""
    mode = getattr(request, "param", "inline")
    running = graph._running()
    if running is not None and (running.config.mode != mode or running.mesh_count > 40):
        dtorch.shutdown()
    dtorch.init(mode=mode, workers=1, threads=1) if mode == "local" else dtorch.init(mode=mode)
    with dtorch.init_device_mesh("cpu", (1,)):
        yield lambda: graph.current_session().reads
    dtorch.synchronize()


@pytest.fixture(scope="module", autouse=True)
def no_workers_left() -> Iterator[None]:
    """The next module may want other workers."""
    yield
    dtorch.shutdown()
