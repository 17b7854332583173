"""linear and matmul under autograd: torch's bits on one device, nothing gathered where leading dimensions are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, value_of

Run = Callable[..., torch.Tensor]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES: dict[str, tuple[Run, tuple[torch.Tensor, ...]]] = {
    "linear": (F.linear, (_x(2, 8, 6), _x(10, 6), _x(10))),
    "linear without bias": (F.linear, (_x(2, 8, 6), _x(10, 6))),
    "linear of four": (F.linear, (_x(2, 3, 8, 6), _x(10, 6), _x(10))),
    "linear of a transposed": (lambda x, w: F.linear(x.transpose(1, 2), w), (_x(2, 6, 8), _x(10, 6))),
    "matrix": (torch.matmul, (_x(2, 8, 6), _x(6, 10))),
    "transposed matrix": (lambda a, b: a @ b.t(), (_x(2, 8, 6), _x(10, 6))),
    "matrix and a transposed": (lambda a, b: a.transpose(1, 2) @ b, (_x(2, 6, 8), _x(6, 10))),
    "transposed matrix and a transposed": (lambda a, b: a.transpose(0, 1) @ b.t(), (_x(8, 2, 6), _x(10, 6))),
    "stack and a transposed": (lambda a, b: a.mT @ b, (_x(2, 3, 6, 8), _x(2, 3, 6, 5))),
    "many rows": (lambda a, b: a.transpose(1, 2) @ b, (_x(3, 96, 130), _x(96, 70))),
    "stack": (torch.matmul, (_x(2, 3, 8, 6), _x(2, 3, 6, 5))),
    "transposed stack": (lambda a, b: a @ b.mT, (_x(2, 3, 8, 6), _x(2, 3, 5, 6))),
    "stacks that broadcast": (torch.matmul, (_x(2, 1, 8, 6), _x(3, 6, 5))),
}


@pytest.mark.parametrize("case", CASES)
def test_bits(case: str) -> None:
    run, values = CASES[case]
    mesh = dtorch.init_device_mesh("cpu", (1,))
    plain = [v.clone().requires_grad_() for v in values]
    mine = [spread(v, mesh, [Replicate()]).requires_grad_() for v in values]
    want, got = run(*plain), run(*mine)
    assert torch.equal(value_of(got.detach()), want.detach())
    for g, w in zip(torch.autograd.grad(got.sin().sum(), mine), torch.autograd.grad(want.sin().sum(), plain), strict=True):
        assert torch.equal(value_of(g), w)
        assert g.stride() == w.stride()


@pytest.mark.parametrize("case", CASES)
def test_second_derivatives(case: str) -> None:
    run, values = CASES[case]
    mesh = dtorch.init_device_mesh("cpu", (2,))
    results = []
    for given in ([v.double().requires_grad_() for v in values],
                  [spread(v.double(), mesh, [Replicate()]).requires_grad_() for v in values]):  # fmt: skip
        first = torch.autograd.grad(run(*given).sin().sum(), given, create_graph=True)
        total = torch.stack([x.cos().sum() for x in first]).sum()
        results.append(torch.autograd.grad(total, given))
    for w, g in zip(*results, strict=True):
        torch.testing.assert_close(value_of(g), w, rtol=1e-9, atol=1e-9)


def test_a_cut_sequence_stays_cut() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    x = spread(_x(2, 8, 6), mesh, [Shard(1)]).requires_grad_()
    w, b = (spread(v, mesh, [Replicate()]).requires_grad_() for v in (_x(10, 6), _x(10)))
    with dtorch.strict():
        out = F.linear(x, w, b)
        out.backward(spread(_x(2, 8, 10), mesh, [Shard(1)]))
    assert placements_of(out) == [Shard(1)]
    assert [placements_of(t.grad) for t in (x, w, b) if t.grad is not None] == [[Shard(1)], [Partial()], [Partial()]]


def test_transforms_see_parts() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    w, x = _x(4, 6), _x(2, 3, 6)
    loss = lambda weight, data: F.linear(data, weight).sin().sum()
    got = torch.func.grad(loss)(spread(w, mesh, [Shard(0)]), spread(x, mesh, [Replicate()]))
    torch.testing.assert_close(value_of(got), torch.func.grad(loss)(w, x))
