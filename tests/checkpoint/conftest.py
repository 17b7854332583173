"""Checkpoints are tested on the default session, as the engine's tests do; each test says in which modes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from tests.engine.conftest import mode, one_thread
from tests.engine.helpers import mesh
from tests.order import local_last

__all__ = ["mode", "one_thread"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs worker processes comes last, so that they start once."""
    local_last(items, HERE)


class Training:
    """A model with dropout, AdamW, a schedule and the randomness that it draws from."""

    def __init__(self, layout: dict[str, int] | None = None, zero: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4)
        )
        if layout is not None:
            where = mesh(*layout.values(), names=tuple(layout))
            plan = {"0": "colwise", "3": "rowwise"}
            self.model = dtorch.parallelize(self.model, where, zero=zero, plan=plan if "tp" in layout else "auto")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "random": dtorch.RandomState(),
        }  # fmt: skip

    def run(self, steps: int) -> list[float]:
        """Train; the losses."""
        found = []
        for _ in range(steps):
            x = torch.randn(6, 8)
            loss = self.model(x.to("dtorch") if next(self.model.parameters()).device.type == "dtorch" else x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            found.append(float(loss.detach()))
        return found


@pytest.fixture
def training() -> Callable[..., Training]:
    return Training
