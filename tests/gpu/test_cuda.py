"""On a CUDA device: the same programs, values close to the CPU's, communication beside computation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import dtorch

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["inline", "local"], autouse=True)
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(mode=request.param, device_type="cuda", workers=1)
    yield
    dtorch.shutdown()


def test_operators_run_on_the_device() -> None:
    mesh = dtorch.DeviceMesh("cuda", [0, 1])
    x, w = torch.randn(64, 32), torch.randn(32, 48)
    for placements in ([dtorch.Shard(0)], [dtorch.Replicate()], [dtorch.Shard(1)]):
        d = dtorch.Tensor(x, device_mesh=mesh, placements=placements)
        y = (d @ dtorch.Tensor(w, device_mesh=mesh)).softmax(-1)
        torch.testing.assert_close(y.to_torch(), (x @ w).softmax(-1), rtol=1e-4, atol=1e-4)


def test_redistribution_overlaps_and_is_awaited() -> None:
    mesh = dtorch.DeviceMesh("cuda", [0, 1])
    x = torch.randn(512, 512)
    d = dtorch.Tensor(x, device_mesh=mesh, placements=[dtorch.Shard(0)])
    for _ in range(20):
        moved = d.redistribute(placements=[dtorch.Shard(1)])
        other = d @ dtorch.Tensor(x, device_mesh=mesh)
        torch.testing.assert_close((moved + other).to_torch(), x + x @ x, rtol=1e-3, atol=1e-2)


def test_gradients() -> None:
    mesh = dtorch.DeviceMesh("cuda", [0, 1])
    w = torch.randn(16, 16)
    leaf = dtorch.Tensor(w, device_mesh=mesh, placements=[dtorch.Shard(0)]).requires_grad_()
    plain = w.clone().requires_grad_()
    for t in (leaf, plain):
        torch.nn.functional.gelu(t @ t).pow(2).mean().backward()
    torch.testing.assert_close(leaf.grad.to_torch(), plain.grad, rtol=1e-4, atol=1e-4)
