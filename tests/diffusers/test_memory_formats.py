"""Results have the CPU's memory order: kernels downstream sum in the order of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch


def image(*shape: int) -> torch.Tensor:
    """Random numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda t: t,
    "channels-last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sequence": lambda t: t.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(t.shape),
    "columns": lambda t: t.mT.contiguous().mT,
}
OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "conv": lambda x, w: F.conv2d(x, w, padding=1),
    "conv-strided": lambda x, w: F.conv2d(x, w, stride=2),
    "conv-1x1": lambda x, w: F.conv2d(x, w[..., :1, :1]),
    "conv-grouped": lambda x, w: F.conv2d(x, w[:, :2], groups=2),
    "conv-transposed": lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2),
    "conv-1d": lambda x, w: F.conv1d(x.flatten(2), w[..., 0]),
    "conv-3d": lambda x, w: F.conv3d(x.unsqueeze(2), w.unsqueeze(2), padding=(0, 1, 1)),
    "pixel-shuffle": lambda x, w: F.pixel_shuffle(x, 2),
    "reflection-pad": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replication-pad": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "group-norm": lambda x, w: F.group_norm(F.conv2d(x, w), 2),
    "upsample": lambda x, w: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "pool": lambda x, w: F.avg_pool2d(x, 2),
    "fft": lambda x, w: torch.fft.fftshift(torch.fft.fftn(x, dim=(-2, -1)), dim=(-2, -1)),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", list(OPERATORS))
def test_as_on_the_cpu(name: str, layout: str, reads: Callable[[], int]) -> None:
    x, w = LAYOUTS[layout](image(3, 4, 6, 5)), image(8, 4, 3, 3)
    want = OPERATORS[name](x, w)
    got = OPERATORS[name](x.to("dtorch"), w.to("dtorch"))
    assert isinstance(got, dtorch.DTensor)
    assert got.stride() == want.stride()
    assert torch.equal(got.to_torch(), want)


@pytest.mark.parametrize("size", [(1, 4, 6, 5), (3, 4, 1, 5), (2, 1, 6, 5)])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_convolution_with_sizes_of_one(size: tuple[int, ...], layout: str, reads: Callable[[], int]) -> None:
    x, w = LAYOUTS[layout](image(*size)), image(8, size[1], 3, 3)
    want = F.conv2d(x, w, padding=1)
    got = F.conv2d(x.to("dtorch"), w.to("dtorch"), padding=1)
    assert got.stride() == want.stride()
    assert torch.equal(got.to_torch(), want)  # type: ignore[attr-defined]


def test_a_distributed_number_in_a_list(reads: Callable[[], int]) -> None:
    t = torch.arange(3.0, device="dtorch")
    assert torch.tensor([t[1], 5.0]).tolist() == [1.0, 5.0]


def test_results_of_unknown_size_from_host_copies(reads: Callable[[], int]) -> None:
    schedule = torch.linspace(9, 1, 5).to("dtorch")
    before = reads()
    assert (schedule == schedule[2]).nonzero().item() == 2
    assert schedule.repeat_interleave(2)[3].item() == 7
    assert reads() == before


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", ["group", "layer"])
def test_statistics_of_norms_in_half_precision(norm: str, weights: torch.dtype, reads: Callable[[], int]) -> None:
    """Their dtype, which only the derivative sees, depends on that of the weights."""
    seen = []
    for device in ("cpu", "dtorch"):
        x = image(2, 8, 4, 4).bfloat16().to(device).requires_grad_()
        w = image(8).to(weights).to(device).requires_grad_()
        out = F.group_norm(x, 2, w, w) if norm == "group" else F.layer_norm(x.transpose(1, 3), [8], w, w)
        out.float().square().sum().backward()
        seen.append([t.detach().cpu() for t in (out, x.grad, w.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
