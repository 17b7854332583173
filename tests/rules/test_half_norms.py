"""Layer and batch norm in half precision, with weights of either precision: values and gradients are torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import dtorch

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("weights", [None, "same", torch.float32])
@pytest.mark.parametrize("placement", [dtorch.Replicate(), dtorch.Shard(0)])
def test_layer_norm(dtype: torch.dtype, weights: torch.dtype | str | None, placement: dtorch.Shard) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = torch.randn(5, 6, dtype=dtype)
    parameters = [None, None]
    if weights is not None:
        parameters = [torch.randn(6, dtype=dtype if weights == "same" else weights) for _ in range(2)]
    plain, spread = x.clone().requires_grad_(), dtorch.Tensor(x, device_mesh=mesh, placements=[placement]).requires_grad_()
    want = F.layer_norm(plain, (6,), *parameters)
    got = F.layer_norm(spread, (6,), *(None if p is None else dtorch.Tensor(p, device_mesh=mesh) for p in parameters))
    assert torch.equal(got.to_torch(), want.detach())
    for out in (want, got):
        out.float().pow(2).sum().backward()
    assert torch.equal(spread.grad.to_torch(), plain.grad)


@pytest.mark.parametrize("dtype", HALF)
def test_batch_norm(dtype: torch.dtype) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    norm = torch.nn.BatchNorm1d(6).to(dtype)
    with mesh:
        spread = copy.deepcopy(norm).to("dtorch")
    x = torch.randn(5, 6, dtype=dtype)
    want, got = norm(x), spread(dtorch.Tensor(x, device_mesh=mesh, placements=[dtorch.Shard(0)]))
    assert torch.equal(got.to_torch(), want.detach())
    assert torch.equal(spread.running_mean.to_torch(), norm.running_mean)
