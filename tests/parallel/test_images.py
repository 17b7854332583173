"""Autoencoders whose images are cut: convolutions exchange borders, values are those of plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL

import dtorch
from dtorch import Replicate, Shard


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize(("window", "padding", "dilation"), [(3, 1, 1), (5, 2, 1), (3, 2, 2)])
def test_convolution(window: int, padding: int, dilation: int, devices: int, format: torch.memory_format) -> None:
    mesh = dtorch.init_device_mesh("cpu", (devices,))
    x, weight, bias = _x(2, 4, 12, 6).to(memory_format=format), _x(6, 4, window, window), _x(6)
    want = F.conv2d(x, weight, bias, padding=padding, dilation=dilation)
    mine = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(2)])
    w, b = (dtorch.Tensor(t, device_mesh=mesh) for t in (weight, bias))
    explained = dtorch.explain(lambda: F.conv2d(mine, w, b, padding=padding, dilation=dilation))
    got = explained.result
    assert got.placements == (Shard(2),)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5)
    # Each device but the first and the last has two neighbours; a ring of sends closes over the ends.
    rows = 2 * 4 * padding * 6 * 4
    assert explained.collectives == {"move": 2}
    assert explained.bytes == 2 * devices * rows


def test_pieces_as_small_as_their_borders() -> None:
    for devices, rows, padding in ((2, 2, 1), (4, 4, 1), (2, 4, 2)):
        mesh = dtorch.init_device_mesh("cpu", (devices,))
        x, weight = _x(3, 4, rows, 3), _x(6, 4, 3, 3)
        mine = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(2)])
        got = F.conv2d(mine, dtorch.Tensor(weight, device_mesh=mesh), padding=padding, dilation=padding)
        torch.testing.assert_close(got.to_torch(), F.conv2d(x, weight, padding=padding, dilation=padding), rtol=1e-5, atol=1e-5)


def test_too_few_rows_are_gathered() -> None:
    mesh = dtorch.init_device_mesh("cpu", (4,))
    x, weight = _x(1, 2, 5, 6), _x(3, 2, 3, 3)  # pieces of 2, 2, 1 and 0 rows
    mine = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(2)])
    got = F.conv2d(mine, dtorch.Tensor(weight, device_mesh=mesh), padding=1)
    torch.testing.assert_close(got.to_torch(), F.conv2d(x, weight, padding=1), rtol=1e-5, atol=1e-5)


def test_group_norm_and_upsampling() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    x, weight, bias = _x(2, 8, 6, 5), _x(8), _x(8)
    mine = dtorch.Tensor(x, device_mesh=mesh, placements=[Shard(2)])
    w, b = (dtorch.Tensor(t, device_mesh=mesh) for t in (weight, bias))
    with torch.no_grad():
        normal = F.group_norm(mine, 4, w, b)
        larger = F.interpolate(mine, scale_factor=2.0, mode="nearest")
    assert normal.placements == larger.placements == (Shard(2),)
    torch.testing.assert_close(normal.to_torch(), F.group_norm(x, 4, weight, bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(larger.to_torch(), F.interpolate(x, scale_factor=2.0, mode="nearest"))


@pytest.mark.parametrize("layout", [{"ulysses_cp": 2}, {"tp": 4}, {"dp": 2, "ring_cp": 2}, {"dp": 2}], ids=str)
def test_decoder(layout: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32), layers_per_block=1, latent_channels=4, norm_num_groups=4,
    ).eval()  # fmt: skip
    latents = _x(2, 4, 16, 8)
    with torch.no_grad():
        want = model.decode(latents).sample
        mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
        dtorch.parallelize(model, mesh)
        explained = dtorch.explain(lambda: model.decode(latents).sample)
    assert explained.result.placements == (Replicate(),) * len(layout)
    torch.testing.assert_close(explained.result.to_torch(), want, rtol=1e-4, atol=1e-4)
    # Gathered are keys and values of the one attention, and the image; of everything else only rows and sums move.
    assert explained.collectives.get("all_gather", 0) <= 2 + len(layout)
    image = [line for line in explained.lines if line.op == "aten.convolution.default"][-1]
    assert "Shard(dim=" in image.outputs[0]
