"""A controller that ends or is stopped: the client learns of it within seconds, and nothing is left."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import dtorch
from dtorch.core.errors import CommError, ControllerLostError
from tests.recovery.conftest import children, pair
from tests.transport.processes import is_alive, wait_until


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_the_client_is_told(open_victims, signum):
    victims = open_victims()
    with victims.graph:
        x = dtorch.Tensor(torch.ones(3, 3), device_mesh=pair())
        (x + 1).sum().item()
        everybody = [*victims.pids, victims.template, victims.controller]
        os.kill(victims.controller, signum)
        started = time.monotonic()
        with pytest.raises(
            ControllerLostError, match=rf"controller process \(pid {everybody[-1]}\).*start a new session"
        ):
            while True:
                x = x + 1
                x.sum().item()
        assert time.monotonic() - started < 5
        assert issubclass(ControllerLostError, CommError)
        with pytest.raises(ControllerLostError):
            x.to_torch()
    victims.graph.close()
    assert wait_until(lambda: not any(map(is_alive, everybody)), 3)
    assert not victims.directory.exists()


def test_a_client_that_waits_for_nothing_but_sends(open_victims):
    victims = open_victims()
    with victims.graph:
        mesh = pair()
        dtorch.zeros(2, device_mesh=mesh).to_torch()
        os.kill(victims.controller, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(ControllerLostError, match="stopped by a signal"):
            while True:
                dtorch.Tensor(torch.randn(1000, 200), device_mesh=mesh)
        assert time.monotonic() - started < 5


def test_a_controller_that_goes_on_is_not_lost(open_victims):
    victims = open_victims()
    with victims.graph:
        x = dtorch.Tensor(torch.ones(3), device_mesh=pair())
        dtorch.synchronize()
        os.kill(victims.controller, signal.SIGSTOP)
        future = (x + 1).to_torch_async()
        time.sleep(0.4)
        os.kill(victims.controller, signal.SIGCONT)
        assert torch.equal(future.get(), torch.full((3,), 2.0))


def test_the_controllers_children_end_with_it(open_victims):
    victims = open_victims()
    with victims.graph:
        dtorch.zeros(2, device_mesh=pair()).to_torch()
        below = [*victims.pids, *children(victims.controller)]
        os.kill(victims.pids[0], signal.SIGSTOP)
        os.kill(victims.controller, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_alive, below)), 3)
