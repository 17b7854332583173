"""Losses against plain torch: means over pieces of different sizes, ignored targets, gradients, placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import placements_of, spread, sweep

Function = Callable[..., Any]
FEW: dict[str, Any] = {"most": 1, "meshes": ((3,), (4,), (2, 2)), "thorough": ((3,),)}


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _classes(high: int, *shape: int, ignore: int | None = None) -> torch.Tensor:
    found = torch.randint(high, shape, generator=torch.Generator().manual_seed(3))
    if ignore is not None:
        found.view(-1)[::3] = ignore
    return found


def with_gradients(run: Function) -> Function:
    """The loss and the gradients of its real inputs; a loss that is not reduced is weighed element by element."""

    def both(*values: torch.Tensor) -> list[Any]:
        given = [v.detach().requires_grad_() if v.is_floating_point() else v for v in values]
        loss = run(*given)
        wanted = [v for v in given if v.requires_grad]
        return [loss.detach(), *torch.autograd.grad((loss * loss.detach().cos()).sum(), wanted, allow_unused=True)]

    return both


def _nll(**options: Any) -> Function:
    return lambda x, t: F.cross_entropy(x, t, **options)


def _weighed(**options: Any) -> Function:
    return lambda x, t, w: F.nll_loss(x, t, w.detach().abs(), **options)


REDUCTIONS = ("none", "mean", "sum")
PAIRS: dict[str, Callable[..., Any]] = {
    "mse": lambda r: lambda a, b: F.mse_loss(a, b, reduction=r),
    "l1": lambda r: lambda a, b: F.l1_loss(a, b, reduction=r),
    "smooth_l1": lambda r: lambda a, b: F.smooth_l1_loss(a, b, reduction=r, beta=0.7),
    "huber": lambda r: lambda a, b: F.huber_loss(a, b, reduction=r, delta=0.5),
    "kl_div": lambda r: lambda a, b: F.kl_div(a, b.sigmoid(), reduction="batchmean" if r == "mean" else r),
    "binary_cross_entropy": lambda r: (
        lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.detach().sigmoid(), reduction=r)
    ),
    "with_logits": lambda r: lambda a, b: F.binary_cross_entropy_with_logits(a, b.detach().sigmoid(), reduction=r),
    "soft_margin": lambda r: lambda a, b: F.soft_margin_loss(a, b.detach().sign(), reduction=r),
}
CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    **{f"{name}, {r}": (make(r), (_x(5, 3), _x(5, 3) + 0.1)) for name, make in PAIRS.items() for r in REDUCTIONS},
    **{f"nll, {r}": (_nll(reduction=r), (_x(7, 5), _classes(5, 7, ignore=-100))) for r in REDUCTIONS},
    **{f"nll weighed, {r}": (_weighed(reduction=r, ignore_index=1), (_x(7, 5), _classes(5, 7), _x(5))) for r in REDUCTIONS},
    **{f"nll of an image, {r}": (_nll(reduction=r), (_x(1, 5, 3, 4), _classes(5, 1, 3, 4, ignore=-100))) for r in REDUCTIONS},
    "nll weighed of an image": (_weighed(), (_x(3, 5, 2, 3), _classes(5, 3, 2, 3, ignore=-100), _x(5))),
    "nll of a line": (_nll(), (_x(3, 5, 4), _classes(5, 3, 4, ignore=-100))),
    "nll of one": (_nll(), (_x(5), torch.tensor(3))),
    "nll of nothing": (_nll(), (_x(5, 3), torch.full((5,), -100))),
    "smoothed": (_nll(label_smoothing=0.2), (_x(7, 5), _classes(5, 7, ignore=-100))),
    "probabilities": (lambda x, p: F.cross_entropy(x, p.softmax(1)), (_x(5, 3), _x(5, 3))),
    "mse of one column": (lambda a, b: F.mse_loss(a, b.expand_as(a)), (_x(5, 3), _x(5, 1))),
    "weighed": (lambda a, w: F.binary_cross_entropy(a.sigmoid(), torch.ones_like(a), w.detach()), (_x(5, 3), _x(5, 3))),
    "positive weight": (lambda a, w: F.binary_cross_entropy_with_logits(a, torch.ones_like(a), pos_weight=w.detach()), (_x(5, 3), _x(3))),
    "multi_margin": (lambda a, t: F.multi_margin_loss(a, t, p=2), (_x(5, 3), _classes(3, 5))),
    "multi_margin weighed": (lambda a, t, w: F.multi_margin_loss(a, t, weight=w.detach(), reduction="none"), (_x(5, 3), _classes(3, 5), _x(3))),
    "multi_margin of one": (F.multi_margin_loss, (_x(3), torch.tensor(1))),
    "multilabel_margin": (F.multilabel_margin_loss, (_x(5, 3), _classes(3, 5, 3, ignore=-1))),
    "multilabel_margin, sum": (lambda a, t: F.multilabel_margin_loss(a, t, reduction="sum"), (_x(7, 3), _classes(3, 7, 3))),
    "multilabel_soft_margin": (lambda a, t: F.multilabel_soft_margin_loss(a, (t > 1).float()), (_x(5, 3), _classes(3, 5, 3))),
    "triplet": (F.triplet_margin_loss, (_x(5, 3), _x(5, 3) + 1, _x(5, 3) - 1)),
    "cosine": (lambda a, b: F.cosine_embedding_loss(a, b, torch.ones(5, device=a.device)), (_x(5, 3), _x(5, 3) + 1)),
    "poisson": (lambda a, b: F.poisson_nll_loss(a, b.detach()), (_x(5, 3), _x(5, 3).abs())),
    "gaussian": (lambda a, b, v: F.gaussian_nll_loss(a, b, v.abs() + 0.1), (_x(5, 3), _x(5, 3), _x(5, 3))),
    "hinge": (lambda a: F.hinge_embedding_loss(a, a.detach().sign()), (_x(5, 3),)),
    "ranking": (lambda a, b: F.margin_ranking_loss(a, b, a.detach().sign()), (_x(5), _x(5) + 0.1)),
    "linear_cross_entropy": (lambda x, w, t: F.linear_cross_entropy(x, w, t, ignore_index=2), (_x(7, 3), _x(5, 3), _classes(5, 7))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str) -> None:
    run, values = CASES[name]
    sweep(with_gradients(run), *values, exact=False, **FEW)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["lists", "tensors", "end to end"])
def test_ctc(reduction: str, kind: str) -> None:
    inputs, lengths = [6, 5, 6, 4, 6], [3, 1, 2, 2, 0]
    targets = 1 + _classes(4, 5, 3)
    if kind == "end to end":
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])

    def run(x: torch.Tensor, t: torch.Tensor, *sizes: torch.Tensor) -> Any:
        return F.ctc_loss(x.log_softmax(-1), t, *(sizes or (inputs, lengths)), reduction=reduction, zero_infinity=True)

    sizes = (torch.tensor(inputs), torch.tensor(lengths)) if kind == "tensors" else ()
    sweep(with_gradients(run), _x(6, 5, 7), targets, *sizes, exact=False, **FEW)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_in_chunks(reduction: str) -> None:
    """torch's own chunked linear cross entropy computes loss and gradients at once."""
    from torch.nn import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions(batch_chunk_size=2)

    def run(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> Any:
        return F.linear_cross_entropy(x, w, t, reduction=reduction, ignore_index=2, options=options)

    sweep(with_gradients(run), _x(7, 3), _x(5, 3), _classes(5, 7), exact=False, **FEW)


def test_half_precision_means_do_not_overflow() -> None:
    mesh, x = dtorch.DeviceMesh("cpu", [0, 1, 2]), torch.full((700, 200), 30.0, dtype=torch.float16)
    loss = F.mse_loss(spread(x, mesh, [Shard(0)]), spread(torch.zeros_like(x), mesh, [Shard(0)]))
    torch.testing.assert_close(loss.to_torch(), torch.tensor(900.0, dtype=torch.float16))


def test_a_target_outside_of_cut_classes_is_an_error() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = spread(_x(4, 6), mesh, [Shard(1)])
    with pytest.raises(dtorch.DtorchError, match="between 0 and 5"):
        F.nll_loss(x, spread(torch.tensor([1, 6, 2, 3]), mesh, [Replicate()])).to_torch()


def test_placements() -> None:
    mesh, rows, total = dtorch.DeviceMesh("cpu", [0, 1]), [Shard(0)], [Partial()]
    x, y = spread(_x(5, 3), mesh, rows), spread(_x(5, 3), mesh, rows)
    assert placements_of(F.mse_loss(x, y)) == placements_of(F.huber_loss(x, y, reduction="sum")) == total
    assert placements_of(F.mse_loss(x, y, reduction="none")) == rows
    x.requires_grad_()
    for reduction in REDUCTIONS:
        target = spread(_classes(3, 5, ignore=-100), mesh, rows)
        loss = F.cross_entropy(x, target, reduction=reduction)
        assert placements_of(loss) == (rows if reduction == "none" else total)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        assert placements_of(gradient) == rows
    classes = spread(_x(5, 4), mesh, [Shard(1)])
    assert placements_of(F.nll_loss(classes, spread(_classes(4, 5), mesh, [Replicate()]))) == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_cut_along_the_vocabulary(dtype: torch.dtype) -> None:
    """Of large logits only what each row sums to travels, up to the loss and back."""
    mesh, target = dtorch.DeviceMesh("cpu", [0, 1, 2]), _classes(1001, 40, ignore=-100)
    plain = _x(40, 1001).to(dtype).requires_grad_()
    cut = spread(plain.detach(), mesh, [Shard(1)]).requires_grad_()
    there = spread(target, mesh, [Replicate()])
    tolerance = {"rtol": 2e-2, "atol": 3e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for run in (F.cross_entropy, lambda x, t: F.softmax(x, 1).square().sum()):
        want, got = run(plain, target), run(cut, there)
        assert placements_of(got) == [Partial()]
        (gradient,) = torch.autograd.grad(got, cut)
        assert placements_of(gradient) == [Shard(1)]
        torch.testing.assert_close(got.to_torch().detach(), want.detach(), **tolerance)
        torch.testing.assert_close(gradient.to_torch(), *torch.autograd.grad(want, plain), **tolerance)
    assert placements_of(F.log_softmax(cut, 1)) == placements_of(F.softmax(cut, 1)) == [Shard(1)]
