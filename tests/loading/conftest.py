"""Loading runs on the default session, as the engine's tests do; each test says in which modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dtorch
from tests.engine.conftest import mode, one_thread
from tests.order import local_last

__all__ = ["mode", "one_thread"]

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs worker processes comes last, so that they start once."""
    local_last(items, HERE)



@pytest.fixture(scope="session")
def values() -> dict[str, torch.Tensor]:
    """Tensors of many shapes and types, small and so large that they do not travel in the stream."""
    torch.manual_seed(0)
    return {
        "rows": torch.randn(700, 501),
        "cube": torch.randn(3, 401, 500).bfloat16(),
        "long": torch.randn(1 << 20).half(),
        "thin": torch.randn(150001, 2),
        "deep": torch.randn(7, 11, 13, 17, 19, 2).double(),
        "whole": torch.randint(-9, 9, (301, 500)),
        "small": torch.randn(5, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "mask": torch.rand(50, 7) > 0.5,
        "complex": torch.randn(3, 4, dtype=torch.complex64),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "float8": torch.randn(16, 16).to(torch.float8_e4m3fn),
    }


@pytest.fixture(scope="session")
def file(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those tensors in a safetensors file; nobody may change it."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(values, path)
    return path


def equal(got: Any, want: torch.Tensor) -> bool:
    """Same type and bits."""
    got = got.detach().to_torch() if isinstance(got, dtorch.DTensor) else got
    flat = lambda t: t.contiguous().view(-1).view(torch.uint8) if t.numel() else t.flatten()
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(flat(got), flat(want))
