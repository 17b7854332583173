"""Linear algebra on stacks of matrices against plain torch, on cut, uneven and empty pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep

Function = Callable[..., Any]


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _square(*stack: int, n: int = 3) -> torch.Tensor:
    """Matrices that are far from singular."""
    return _x(*stack, n, n) + 4 * torch.eye(n)


def _positive(*stack: int, n: int = 3) -> torch.Tensor:
    a = _square(*stack, n=n)
    return a @ a.mT


def _unpacked(a: torch.Tensor) -> Any:
    lu, pivots = torch.linalg.lu_factor(a)
    return torch.lu_unpack(lu, pivots, unpack_pivots=False)[1:]


STACKS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "inv": (torch.linalg.inv, (_square(5),)),
    "inv of one": (torch.linalg.inv, (_square(),)),
    "inv of two": (torch.linalg.inv, (_square(3, 2),)),
    "det": (torch.linalg.det, (_square(5),)),
    "slogdet": (torch.linalg.slogdet, (_square(3, 2),)),
    "eigh": (lambda a: torch.linalg.eigh(a)[0], (_positive(5),)),
    "eigvalsh": (torch.linalg.eigvalsh, (_positive(5),)),
    "eig": (torch.linalg.eigvals, (_square(3),)),
    "svdvals": (torch.linalg.svdvals, (_x(5, 4, 3),)),
    "svd": (lambda a: _rebuilt(torch.linalg.svd(a, full_matrices=False)), (_x(3, 4, 2),)),
    "qr": (torch.linalg.qr, (_x(5, 4, 3),)),
    "geqrf": (torch.geqrf, (_x(3, 4, 3),)),
    "cholesky": (torch.linalg.cholesky, (_positive(5),)),
    "old cholesky": (lambda a: torch.cholesky(a, upper=True), (_positive(3),)),
    "cholesky_inverse": (lambda a: torch.cholesky_inverse(torch.linalg.cholesky(a)), (_positive(3),)),
    "lu": (torch.linalg.lu, (_square(5),)),
    "lu_factor": (torch.linalg.lu_factor, (_square(3, 2),)),
    "lu_unpack": (_unpacked, (_square(5),)),
    "ldl_factor": (torch.linalg.ldl_factor, (_positive(5),)),
    "matrix_exp": (torch.linalg.matrix_exp, (_x(5, 3, 3),)),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, 3), (_x(5, 3, 3),)),
    "householder_product": (lambda a: torch.linalg.householder_product(*torch.geqrf(a)), (_x(3, 4, 3),)),
    "pinv": (torch.linalg.pinv, (_x(3, 4, 2),)),
    "matrix_rank": (torch.linalg.matrix_rank, (_x(5, 4, 2),)),
    "cond": (torch.linalg.cond, (_square(5),)),
    "matrix_norm": (lambda a: torch.linalg.matrix_norm(a, 1), (_x(5, 4, 3),)),
    "nuclear norm": (lambda a: torch.linalg.matrix_norm(a, "nuc"), (_x(5, 4, 3),)),
    "lstsq": (lambda a, b: torch.linalg.lstsq(a, b).solution, (_x(3, 5, 2), _x(3, 5, 1))),
    "multi_dot": (lambda a, b, c: torch.linalg.multi_dot([a, b, c]), (_x(5, 3), _x(3, 7), _x(7, 1))),
    "tensorinv": (lambda a: torch.linalg.tensorinv(a.reshape(2, 3, 6)), (_square(n=6),)),
}

SOLVES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "solve": (torch.linalg.solve, (_square(5), _x(5, 3, 7))),
    "solve vectors": (torch.linalg.solve, (_square(5), _x(5, 3))),
    "solve one vector": (torch.linalg.solve, (_square(2), _x(3))),
    "solve from the right": (lambda a, b: torch.linalg.solve(a, b, left=False), (_square(3), _x(3, 7, 3))),
    "one matrix for all": (torch.linalg.solve, (_square(), _x(5, 3, 2))),
    "one right-hand side": (torch.linalg.solve, (_square(5), _x(3, 2))),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True),
        (_square(5), _x(1, 3, 7)),
    ),
    "solve_triangular from the right": (
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False, left=False),
        (_square(2), _x(2, 5, 3)),
    ),
    "triangular_solve": (lambda b, a: torch.triangular_solve(b, a.triu()), (_x(5, 3, 2), _square())),
    "cholesky_solve": (lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(a)), (_x(3, 5), _positive(2))),
    "lu_solve": (lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b), (_square(3), _x(3, 3, 5))),
    "lu_solve one for all": (
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b, adjoint=True),
        (_square(), _x(5, 3, 2)),
    ),
    "ldl_solve": (lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a), b), (_positive(3), _x(3, 3, 5))),
    "ormqr": (lambda a, b: torch.ormqr(*torch.geqrf(a), b), (_x(3, 4, 3), _x(3, 4, 5))),
    "ormqr from the right": (lambda a, b: torch.ormqr(*torch.geqrf(a), b, left=False), (_x(4, 3), _x(5, 4))),
}

OTHERS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "cross": (torch.linalg.cross, (_x(5, 3), _x(1, 3))),
    "cross along 0": (lambda a, b: torch.linalg.cross(a, b, dim=0), (_x(3, 5, 1), _x(3, 1, 7))),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, beta=2), (_x(7), _x(3, 5, 2), _x(3, 2, 7))),
    "addbmm into a matrix": (torch.addbmm, (_x(5, 7), _x(3, 5, 2), _x(3, 2, 7))),
    "cdist": (lambda a, b: torch.cdist(a, b, p=1), (_x(5, 3), _x(7, 3))),
    "cdist in stacks": (torch.cdist, (_x(3, 5, 2), _x(1, 7, 2))),
    "dist": (torch.dist, (_x(5, 3), _x(3))),
    "kron": (torch.kron, (_x(5, 3), _x(2, 3))),
    "outer": (torch.outer, (_x(5), _x(7))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=([1], [0])), (_x(5, 3, 2), _x(3, 7))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->ibk", a, b), (_x(5, 3, 2), _x(5, 2, 7))),
    "trace": (torch.trace, (_x(5, 7),)),
    "vander": (torch.linalg.vander, (_x(5),)),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 3), (_x(5, 3),)),
    "largest": (lambda x: torch.linalg.vector_norm(x, float("inf"), 0), (_x(5, 3),)),
    "int_mm": (lambda a, b: torch._int_mm((a * 9).to(torch.int8), (b * 9).to(torch.int8)), (_x(17, 8), _x(8, 8))),
    "addmm_activation": (torch._addmm_activation, (_x(7), _x(5, 3), _x(3, 7))),
    "grouped_mm": (
        lambda a, b, o: torch._grouped_mm(a.bfloat16(), b.bfloat16(), offs=o),
        (_x(5, 8), _x(3, 8, 16), torch.tensor([1, 3, 5], dtype=torch.int32)),
    ),
    "grouped_mm of stacks": (lambda a, b: torch._grouped_mm(a.bfloat16(), b.bfloat16()), (_x(3, 5, 8), _x(3, 8, 16))),
    "grouped_mm within": (
        lambda a, b, o: torch._grouped_mm(a.bfloat16(), b.bfloat16(), offs=o),
        (_x(8, 16), _x(16, 8), torch.tensor([8, 16], dtype=torch.int32)),
    ),
}


def _rebuilt(parts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular vectors have a free sign: what they rebuild has none."""
    u, s, v = parts
    return s, u @ torch.diag_embed(s) @ v


@pytest.mark.parametrize("name", [*STACKS, *SOLVES, *OTHERS])
def test_values(name: str) -> None:
    run, values = {**STACKS, **SOLVES, **OTHERS}[name]
    meshes = ((2,), (4,), (2, 2))
    sweep(run, *values, exact=False, partial=name in ("addbmm", "cdist", "trace"), meshes=meshes, most=5)


def test_stacks_and_columns_stay_cut() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    a, b = spread(_square(5), mesh, [Shard(0)]), spread(_x(5, 3, 7), mesh, [Replicate()])
    for result in (torch.linalg.inv(a), *torch.linalg.svd(a), torch.linalg.det(a), torch.linalg.eigvalsh(a @ a.mT)):
        assert placements_of(result) == [Shard(0)]
    assert placements_of(torch.linalg.solve(a, b)) == [Shard(0)]
    whole = spread(_square(5), mesh, [Replicate()])
    columns = spread(_x(5, 3, 7), mesh, [Shard(2)])
    assert placements_of(torch.linalg.solve(whole, columns)) == [Shard(2)]
    assert placements_of(torch.linalg.solve_triangular(whole, columns, upper=True)) == [Shard(2)]
    assert placements_of(torch.cdist(columns, b.detach())) == [Replicate()]
    near, far = spread(_x(5, 3), mesh, [Shard(0)]), spread(_x(7, 3), mesh, [Replicate()])
    assert placements_of(torch.cdist(near, far)) == [Shard(0)]


GRADIENTS: dict[str, Function] = {
    "inv": torch.linalg.inv,
    "det": torch.linalg.det,
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a @ a.mT),
    "qr": lambda a: torch.linalg.qr(a)[1],
    "solve": lambda a: torch.linalg.solve(a, a + 1),
    "matrix_exp": lambda a: torch.linalg.matrix_exp(a / 4),
    "cdist": lambda a: torch.cdist(a, a + 1),
    "addbmm": lambda a: torch.addbmm(a[0], a, a),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    def gradient(x: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        GRADIENTS[name](leaf).square().sum().backward()
        return leaf.grad

    sweep(gradient, _square(3), exact=False, partial=False, meshes=((2,), (2, 2)))
