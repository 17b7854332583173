"""Layers of neural networks against plain torch: values, gradients, and the placements that they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.rules.sweep import MESHES, placements_of, spread, sweep

Function = Callable[..., Any]
# Every placement of each tensor on three devices, some others elsewhere.
FEW: dict[str, Any] = {"most": 1, "meshes": ((3,), (4,), (2, 2)), "thorough": ((3,),)}
Case = tuple[Function, tuple[torch.Tensor, ...]]
aten = torch.ops.aten


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(len(shape)))


def with_gradients(run: Function) -> Function:
    """The function's results and the gradients of real inputs, for a loss that weighs every element differently."""

    def both(*values: torch.Tensor) -> list[Any]:
        given = [v.detach().requires_grad_() if v.is_floating_point() else v for v in values]
        results = run(*given)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        loss = sum(r.sin().sum() for r in results if r.requires_grad)
        wanted = [v for v in given if v.requires_grad]
        return [*(r.detach() for r in results), *torch.autograd.grad(loss, wanted, allow_unused=True)]

    return both


_CORNERS = torch.tensor([[0, 2], [9, 15]])
# Compared to the last bit: values are moved, picked or the largest taken.
EXACT: dict[str, Case] = {
    "embedding": (F.embedding, (_whole(5, 3, 4), _x(5, 3))),
    "embedding of one": (F.embedding, (_whole(7, 1), _x(7, 2))),
    "embedding_renorm": (lambda i, w: F.embedding(i, w.clone(), max_norm=0.5), (_whole(5, 3), _x(5, 3))),
    "one_hot": (lambda i: F.one_hot(i, 5), (_whole(5, 3, 2),)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 3, 2, 1), (_x(3, 5, 7),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True), (_x(3, 5, 4, 6),)),
    "max_pool2d, one sample": (lambda x: F.max_pool2d(x, 2), (_x(5, 4, 6),)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2, return_indices=True), (_x(3, 1, 2, 4, 4),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True), (_x(1, 5, 4, 6),)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, 2), (_x(3, 2, 4, 4, 2),)),
    "max_unpool2d": (lambda x, i: F.max_unpool2d(x, i, 2), (_x(3, 5, 2, 2), _CORNERS.expand(3, 5, 2, 2))),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2.5), (_x(3, 5, 4, 6),)),
    "nearest-exact": (lambda x: F.interpolate(x, size=7, mode="nearest-exact"), (_x(3, 5, 4),)),
    "nearest in three": (lambda x: F.interpolate(x, scale_factor=2), (_x(3, 5, 2, 1, 2),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (_x(3, 8, 4, 3),)),
    "pixel_shuffle, no samples": (lambda x: F.pixel_shuffle(x, 3), (_x(18, 2, 3),)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (_x(3, 2, 8, 6),)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (_x(3, 6, 4, 5),)),
    "native_channel_shuffle": (lambda x: F.native_channel_shuffle(x, 3), (_x(3, 6, 4, 5),)),
    "pad": (lambda x: F.pad(x, (1, 2)), (_x(3, 5),)),
    "pad and crop": (lambda x: F.pad(x, (-1, 2, 0, 0, 1, 0), value=3.0), (_x(3, 5, 4),)),
    "pad nothing": (lambda x: F.pad(x, (0, 0)), (_x(3, 5),)),
    "reflect": (lambda x: F.pad(x, (1, 2), mode="reflect"), (_x(3, 5, 4),)),
    "reflect one of two": (lambda x: F.pad(x, (0, 0, 2, 1), mode="reflect"), (_x(3, 5, 4, 6),)),
    "replicate": (lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), (_x(1, 5, 4, 3),)),
    "replicate in three": (lambda x: F.pad(x, (1, 0, 0, 0, 0, 2), mode="replicate"), (_x(1, 5, 4, 3, 2),)),
    "circular": (lambda x: F.pad(x, (2, 1), mode="circular"), (_x(3, 5, 4),)),
    "unfold": (lambda x: F.unfold(x, 2, padding=1), (_x(3, 5, 4, 3),)),
    "unfold, one sample": (lambda x: F.unfold(x, 2), (_x(4, 4, 3),)),
}

# Compared within rounding, with gradients.
CLOSE: dict[str, Case] = {
    "softmax": (lambda x: F.softmax(x, -1), (_x(3, 5, 7),)),
    "softmax, first dimension": (lambda x: F.softmax(x, 0), (_x(3, 5),)),
    "softmax of a number": (lambda x: F.softmax(x, 0), (_x(),)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), (_x(3, 5, 2),)),
    "softmin of half": (lambda x: F.softmin(x.bfloat16(), 1, dtype=torch.float32), (_x(3, 5),)),
    "safe_softmax": (lambda x: aten._safe_softmax(x, -1), (_x(3, 5),)),
    "glu": (lambda x: F.glu(x, 1), (_x(3, 4, 5),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), (_x(3, 5, 7), _x(7), _x(7))),
    "layer_norm of two": (lambda x, w: F.layer_norm(x, (5, 2), w), (_x(3, 5, 2), _x(5, 2))),
    "layer_norm, plain": (lambda x: F.layer_norm(x, (4,)), (_x(7, 4),)),
    "layer_norm of all": (lambda x, w, b: F.layer_norm(x, (7,), w, b), (_x(7), _x(7), _x(7))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (7,), w), (_x(3, 5, 7), _x(7))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (_x(3, 8, 5), _x(8), _x(8))),
    "group_norm, one group": (lambda x, w: F.group_norm(x, 1, w), (_x(3, 6, 2, 2), _x(6))),
    "group_norm, plain": (lambda x: F.group_norm(x, 6), (_x(1, 6, 5),)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (_x(3, 5, 2, 2), _x(5), _x(5))),
    "batch_norm of rows": (lambda x: F.batch_norm(x, None, None, training=True), (_x(7, 5),)),
    "batch_norm, settled": (lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach().abs() + 1, w), (_x(3, 5, 2), _x(5), _x(5), _x(5))),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (_x(3, 5, 4), _x(5), _x(5))),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (_x(3, 5, 4), _x(7, 5, 3), _x(7))),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2, dilation=2), (_x(3, 4, 5, 7), _x(1, 4, 2, 3))),
    "conv2d of points": (lambda x, w, b: F.conv2d(x, w, b), (_x(1, 3, 5, 2), _x(5, 3, 1, 1), _x(5))),
    "conv2d of patches": (lambda x, w, b: F.conv2d(x, w, b, stride=2), (_x(1, 3, 8, 6), _x(5, 3, 2, 2), _x(5))),
    "conv2d of groups": (lambda x, w, b: F.conv2d(x, w, b, groups=4), (_x(3, 8, 4, 3), _x(4, 2, 2, 2), _x(4))),
    "conv1d of channels": (lambda x, w: F.conv1d(x, w, groups=6), (_x(3, 6, 4), _x(12, 1, 3))),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b), (_x(3, 2, 2, 3, 2), _x(3, 2, 2, 2, 1), _x(3))),
    "conv_transpose1d": (lambda x, w, b: F.conv_transpose1d(x, w, b), (_x(3, 5, 4), _x(5, 3, 2), _x(3))),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (_x(1, 3, 4, 2), _x(3, 5, 2, 2))),
    "conv_transpose1d of groups": (lambda x, w, b: F.conv_transpose1d(x, w, b, 2, groups=2), (_x(3, 4, 3), _x(4, 3, 3), _x(6))),
    "conv of one sample": (lambda x, w, b: F.conv2d(x, w, b), (_x(3, 4, 5), _x(5, 3, 2, 2), _x(5))),
    "conv_tbc": (lambda x, w, b: torch.conv_tbc(x, w, b, 1), (_x(5, 3, 2), _x(3, 2, 4), _x(4))),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2, padding=1), (_x(3, 5, 4),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (_x(3, 5, 4, 4),)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (_x(3, 1, 2, 4, 2),)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (_x(3, 5, 4, 4),)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (_x(1, 3, 2, 4, 2),)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 3), (_x(3, 5, 7),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), (_x(3, 5, 4, 4),)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, (1, 3, 2)), (_x(3, 5, 2, 4, 4),)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), (_x(3, 5, 4, 4),)),
    "adaptive_max_pool3d": (lambda x: F.adaptive_max_pool3d(x, (1, 3, 2)), (_x(3, 2, 2, 4, 4),)),
    "fractional_max_pool2d": (lambda x, r: aten.fractional_max_pool2d(x, [2, 2], [2, 3], r.detach()), (_x(3, 5, 4, 6), _x(3, 5, 2).sigmoid())),
    "fractional_max_pool3d": (lambda x, r: aten.fractional_max_pool3d(x, [2, 2, 2], [1, 2, 3], r.detach())[0], (_x(5, 3, 4, 6), _x(1, 5, 3).sigmoid())),
    "local_response_norm": (lambda x: F.local_response_norm(x, 2), (_x(3, 5, 4),)),
    "linear": (lambda x: F.interpolate(x, size=7, mode="linear"), (_x(3, 5, 4),)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear", align_corners=True), (_x(3, 5, 4, 6),)),
    "bilinear, smoothed": (lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True), (_x(3, 5, 4, 6),)),
    "bicubic": (lambda x: F.interpolate(x, size=(5, 3), mode="bicubic"), (_x(1, 3, 4, 6),)),
    "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (_x(3, 1, 2, 2, 3),)),
    "nearest2d": (lambda x: F.interpolate(x, scale_factor=2), (_x(3, 5, 4, 2),)),
    "nearest-exact2d": (lambda x: F.interpolate(x, size=7, mode="nearest-exact"), (_x(3, 5, 4, 4),)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (_x(3, 5, 4, 6), _x(3, 2, 5, 2).tanh())),
    "grid_sample in three": (lambda x, g: F.grid_sample(x, g, "nearest", "border", True), (_x(1, 3, 2, 3, 2), _x(1, 3, 1, 2, 3).tanh())),
    "affine_grid": (lambda t: F.affine_grid(t, [3, 1, 2, 5], False), (_x(3, 2, 3),)),
    "reflect": (lambda x: F.pad(x, (2, 1), mode="reflect"), (_x(3, 5, 4),)),
    "reflect in three": (lambda x: F.pad(x, (1, 1, 0, 0, 0, 0), mode="reflect"), (_x(1, 3, 2, 3, 4),)),
    "replicate": (lambda x: F.pad(x, (0, 0, 1, 0), mode="replicate"), (_x(1, 3, 4, 3),)),
    "constant": (lambda x: F.pad(x, (0, 1, 2, 0)), (_x(3, 5, 4),)),
    "fold": (lambda x: F.fold(x, (4, 5), 2), (_x(3, 12, 12),)),
    "unfold": (lambda x: F.unfold(x, 2), (_x(3, 5, 4, 3),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (_x(3, 4, 2, 3),)),
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=1), (_whole(5, 3, 4), _x(5, 3))),
    "embedding by frequency": (lambda i, w: F.embedding(i, w, scale_grad_by_freq=True), (_whole(5, 7), _x(5, 3))),
    "embedding_bag": (lambda i, w: F.embedding_bag(i, w), (_whole(5, 3, 4), _x(5, 3))),
    "embedding_bag sum": (lambda i, o, w: F.embedding_bag(i, w, o, mode="sum", padding_idx=2), (_whole(5, 7), torch.tensor([0, 2, 2]), _x(5, 3))),
    "embedding_bag max": (lambda i, o, w: F.embedding_bag(i, w, o, mode="max"), (_whole(5, 7), torch.tensor([0, 3, 3]), _x(5, 3))),
    "embedding_bag weighed": (lambda i, o, w, s: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=s, include_last_offset=True),
                              (_whole(5, 7), torch.tensor([0, 3, 7]), _x(5, 3), _x(7))),
    "bilinear layer": (lambda a, b, w, c: F.bilinear(a, b, w, c), (_x(3, 5), _x(3, 2), _x(4, 5, 2), _x(4))),
    "prelu": (lambda x, w: F.prelu(x, w), (_x(3, 5, 2), _x(5))),
    "cosine_similarity": (lambda a, b: F.cosine_similarity(a, b, 1), (_x(3, 5, 2), _x(3, 5, 2) + 1)),
    "normalize": (lambda x: F.normalize(x, dim=1), (_x(3, 5),)),
    "pdist": (F.pdist, (_x(5, 3),)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_values(name: str) -> None:
    run, values = EXACT[name]
    sweep(run, *values, **FEW)


@pytest.mark.parametrize("name", CLOSE)
def test_values_and_gradients(name: str) -> None:
    run, values = CLOSE[name]
    sweep(with_gradients(run), *values, exact=False, **FEW)


def _running(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
    mean, variance = mean.clone(), variance.clone().abs()
    out = F.batch_norm(x, mean, variance, training=True, momentum=0.3)
    return [out, mean, variance]


def test_running_statistics_are_written() -> None:
    sweep(_running, _x(3, 5, 2), _x(5), _x(5), exact=False, **FEW)


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_of_a_cut_batch(affine: bool) -> None:
    """Training on a large batch: statistics are those of all samples, and the batch stays cut."""
    mesh, images = dtorch.DeviceMesh("cpu", [0, 1, 2]), _x(7, 8, 20, 20)
    weights = [_x(8), _x(8)] if affine else []

    def run(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, *w: torch.Tensor) -> list[torch.Tensor]:
        mean, variance = mean.detach(), variance.detach()
        out = F.batch_norm(x, mean, variance, *w, training=True, momentum=0.3)
        return [out, mean, variance]

    values = [images, torch.zeros(8), torch.ones(8), *weights]
    given = [spread(v.clone(), mesh, [Shard(0) if v is images else Replicate()]) for v in values]
    want, got = with_gradients(run)(*[v.clone() for v in values]), with_gradients(run)(*given)
    assert placements_of(got[0]) == placements_of(got[3]) == [Shard(0)]
    for g, w in zip(got, want, strict=True):
        if w is not None:
            torch.testing.assert_close(g.to_torch(), w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(3, 4, num_layers=2, bidirectional=True)
    names = [n for n, _ in layer.named_parameters()]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        out = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), x)
        return out[0], *(out[1] if isinstance(out[1], tuple) else out[1:])

    weights = [p.detach() for p in layer.parameters()]
    want = with_gradients(run)(_x(5, 3, 3), *weights)
    for shape in MESHES:
        mesh = dtorch.DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist())
        for cut in (Replicate(), Shard(0), Shard(1)):
            whole = [Replicate()] * len(shape)
            x = spread(_x(5, 3, 3), mesh, [cut] * len(shape))
            got = with_gradients(run)(x, *(spread(w, mesh, whole) for w in weights))
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g.to_torch(), w, rtol=1e-4, atol=1e-4)


def test_an_index_outside_of_a_cut_vocabulary_is_an_error() -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    weight = spread(_x(6, 3), mesh, [Shard(0)])
    with pytest.raises(dtorch.DtorchError, match="between 0 and 5"):
        F.embedding(spread(torch.tensor([1, 6]), mesh, [Replicate()]), weight).to_torch()


def _places(
    run: Function, values: list[torch.Tensor], placements: list[Any], shape: tuple[int, ...] = (2,)
) -> list[Any]:
    """Placements of the first result, before anything reads it, and of the gradients."""
    mesh = dtorch.DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist())
    given = [spread(v, mesh, p if isinstance(p, list) else [p]) for v, p in zip(values, placements, strict=True)]
    result = run(*given)
    first = placements_of(result[0] if isinstance(result, tuple) else result)
    out = [first, *(placements_of(g) for g in with_gradients(run)(*given)[1:] if g is not None)]
    return [p[0] if len(p) == 1 else p for p in out]


def test_placements_are_kept() -> None:
    whole, rows, columns, total = Replicate(), Shard(0), Shard(1), Partial()
    norm = lambda x, w, b: F.layer_norm(x, (6,), w, b)
    assert _places(norm, [_x(4, 2, 6), _x(6), _x(6)], [columns, whole, whole]) == [columns, columns, total, total]
    group = lambda x, w, b: F.group_norm(x, 4, w, b)
    images = [_x(4, 8, 3), _x(8), _x(8)]
    assert _places(group, images, [columns, rows, rows]) == [columns, columns, rows, rows]
    assert _places(group, images, [columns, whole, whole])[0] == columns
    assert _places(group, images, [rows, whole, whole]) == [rows, rows, total, total]
    conv = lambda x, w, b: F.conv2d(x, w, b)
    images = [_x(4, 6, 5, 5), _x(8, 6, 3, 3), _x(8)]
    assert _places(conv, images, [rows, whole, whole]) == [rows, rows, total, total]
    assert _places(conv, images, [whole, rows, rows]) == [columns, total, rows, rows]
    assert _places(conv, images, [columns, columns, whole])[0] == total
    assert _places(conv, images, [[rows, whole], [whole, rows], [whole, rows]], (2, 2))[0] == [rows, columns]
    patches = [_x(1, 3, 8, 8), _x(5, 3, 2, 2), _x(5)]
    assert _places(lambda *a: F.conv2d(*a, stride=2), patches, [Shard(2), whole, whole])[0] == Shard(2)
    assert _places(F.embedding, [_whole(8, 4, 3), _x(8, 6)], [whole, rows])[0] == total
    assert _places(F.embedding, [_whole(8, 4, 3), _x(8, 6)], [whole, columns]) == [Shard(2), columns]
    assert _places(F.embedding, [_whole(8, 4, 3), _x(8, 6)], [rows, whole]) == [rows, total]
    assert _places(lambda x: F.max_pool2d(x, 2), [_x(4, 6, 4, 4)], [columns]) == [columns, columns]
    assert _places(lambda x: F.interpolate(x, scale_factor=2), [_x(4, 6, 4)], [rows]) == [rows, rows]
    assert _places(lambda x: F.pixel_shuffle(x, 2), [_x(4, 8, 4, 4)], [columns]) == [columns, columns]
    assert _places(lambda x: F.pad(x, (1, 1)), [_x(4, 8)], [rows]) == [rows, rows]
    assert _places(lambda x: F.softmax(x, -1), [_x(4, 8)], [rows]) == [rows, rows]
    assert _places(lambda x: F.softmax(x, -1), [_x(4, 8)], [columns])[0] == whole
