"""Tensors as each device sees them, and back: values, placements, gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch.client.each import exchange, from_each, refuse_reads, to_each
from dtorch.core.placements import Partial, Shard

N = 4


def mesh() -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (2, N), mesh_dim_names=("dp", "ep"))


def test_parts_and_terms() -> None:
    plain = torch.randn(8, 3)
    x = dtorch.distribute_tensor(plain, mesh(), [dtorch.Shard(0), dtorch.Shard(0)]).requires_grad_()
    w = dtorch.distribute_tensor(torch.randn(3), mesh()).requires_grad_()
    report = dtorch.explain(lambda: from_each(to_each(x, (0, 1)).cumsum(0) * to_each(w, (0, 1)), {0: Shard(0), 1: Shard(0)}), quiet=True)
    got = report.result
    assert report.collectives == {}
    ref, w_ref = plain.clone().requires_grad_(), w.to_torch().requires_grad_()
    want = torch.cat([part.cumsum(0) for part in ref.chunk(2 * N)]) * w_ref
    torch.testing.assert_close(got.to_torch(), want.detach())
    weight = torch.randn(8, 3)
    (got * dtorch.distribute_tensor(weight, mesh())).sum().backward()
    (want * weight).sum().backward()
    torch.testing.assert_close(x.grad.to_torch(), ref.grad)
    torch.testing.assert_close(w.grad.to_torch(), w_ref.grad)
    total = from_each(to_each(x, (0, 1)).sum(0), {0: Partial("sum"), 1: Partial("sum")})
    torch.testing.assert_close(total.to_torch(), plain.sum(0))


def test_exchange() -> None:
    plain = torch.randn(2, N, N, 2, 3)  # replica, device, row for a device, ...
    placements = [dtorch.Shard(0), dtorch.Shard(1)]
    x = dtorch.distribute_tensor(plain, mesh(), placements).requires_grad_()

    def swap() -> torch.Tensor:
        mine = to_each(x, (0, 1)).view(N, 2, 3)
        return from_each(exchange(mine, 1).view(1, 1, N, 2, 3), {0: Shard(0), 1: Shard(1)})

    report = dtorch.explain(swap, quiet=True)
    assert report.collectives == {"all_to_all": 1}
    assert report.bytes == plain.nbytes * (N - 1) // N
    torch.testing.assert_close(report.result.to_torch(), plain.transpose(1, 2))
    weight = torch.randn_like(plain)
    (report.result * dtorch.distribute_tensor(weight, mesh(), placements)).sum().backward()
    torch.testing.assert_close(x.grad.to_torch(), weight.transpose(1, 2))


def test_refusals() -> None:
    uneven = dtorch.distribute_tensor(torch.randn(6, 2), mesh(), [dtorch.Replicate(), dtorch.Shard(0)])
    with pytest.raises(dtorch.PlacementError, match="uneven"):
        to_each(uneven, (1,))
    session = uneven._h.session
    before = session.reads
    refuse_reads(session, before, "f")
    uneven.sum().item()
    with pytest.raises(dtorch.DtorchError, match="f reads values"):
        refuse_reads(session, before, "f")
