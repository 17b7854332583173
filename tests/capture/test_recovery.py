"""A record survives the workers that run it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import dtorch
from tests.engine.helpers import S0, full, local_mode, mesh, spread

pytestmark = [local_mode, pytest.mark.filterwarnings("error")]


def test_a_lost_worker_is_replaced(mode):
    on = mesh(2)
    buffer = spread(torch.zeros(4, 2), on, S0)

    @dtorch.capture
    def f(x):
        buffer.add_(x)
        return buffer.sum() + torch.dropout(x, 0.5, True).sum() * 0

    for i in range(1, 9):
        x = spread(torch.ones(4, 2), on, S0)
        total = f(x)
        if i in (4, 6):
            os.kill(dtorch.workers()[i % 2].pid, signal.SIGKILL)
        assert float(total) == 8.0 * i
    assert torch.equal(full(buffer), torch.full((4, 2), 8.0))
    assert f.replays == 6
