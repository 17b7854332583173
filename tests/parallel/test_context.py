"""Attention under context parallelism against plain torch: values, gradients, placements, and what is communicated."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch.worker import ring

MESHES = [
    (("ulysses_cp",), (2,), (2,)),
    (("ulysess_cp",), (3,), (2,)),
    (("ring_cp",), (2,), (2,)),
    (("ring_cp",), (4,), (2,)),
    (("ring_cp",), (3,), (2,)),
    (("ulysses_cp", "ring_cp"), (2, 2), (2, 2)),
    (("tp", "ring_cp"), (2, 2), (1, 2)),
    (("ring_cp", "ring_cp_outer"), (2, 2), (2, 2)),
    (("ring_cp_inner", "ulysses_cp", "ring_cp_outer"), (2, 2, 3), (2, 2, 2)),
    (("tp", "ulysses_cp"), (2, 2), (1, 2)),
    (("dp", "ring_cp"), (2, 2), (0, 2)),
]


@pytest.mark.parametrize(("names", "shape", "dims"), MESHES, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize(("length", "kept"), [(8, 4), (7, 2), (3, 1)])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("cut", ["plain", "segments", "balanced"])
def test_attention(
    names: tuple[str, ...], shape: tuple[int, ...], dims: tuple[int, ...], length: int, kept: int, kind: str, cut: str
) -> None:
    torch.manual_seed(0)
    mesh = dtorch.init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain = [torch.randn(2, heads, length, 8) for heads in (4, kept, kept)]
    mask = (torch.rand(2, 1, length, length) > 0.3) | torch.eye(length, dtype=torch.bool) if kind == "masked" else None
    ref = [t.clone().requires_grad_() for t in plain]
    options = {"is_causal": kind == "causal", "enable_gqa": kept != 4}
    want = F.scaled_dot_product_attention(*ref, attn_mask=mask, **options)
    first = length // 2
    segments = {"plain": (), "segments": (first, length - first), "balanced": (first, first - length)}[cut]
    placements = [dtorch.Shard(d, segments if d == 2 else ()) for d in dims]
    got = [dtorch.Tensor(t, device_mesh=mesh, placements=placements) for t in plain]
    spread = dtorch.Tensor(mask, device_mesh=mesh) if mask is not None else None
    with torch.no_grad():
        out = F.scaled_dot_product_attention(*got, attn_mask=spread, **options)
    assert list(out.placements) == placements
    torch.testing.assert_close(out.to_torch(), want.detach(), rtol=1e-5, atol=1e-5)
    for t in got:
        t.requires_grad_()
    out = F.scaled_dot_product_attention(*got, attn_mask=spread, **options)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    for mine, theirs in zip(got, ref, strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["full", "causal", "masked by heads"])
@pytest.mark.parametrize(("heads", "kept"), [(8, 8), (8, 4), (6, 2)])
@pytest.mark.parametrize("layout", [{"ring_cp": 3}, {"tp": 2, "ring_cp": 2}], ids=str)
def test_large_blocks_go_round_in_parts_of_the_heads(
    layout: dict[str, int], heads: int, kept: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_PART_BYTES", 1)
    torch.manual_seed(0)
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    placements = [dtorch.Shard(1 if axis == "tp" else 2) for axis in layout]
    plain = [torch.randn(2, n, 7, 8) for n in (heads, kept, kept)]
    mask = torch.randn(2, heads, 7, 7) if kind == "masked by heads" else None
    options = {"is_causal": kind == "causal", "enable_gqa": kept != heads}
    ref = [t.clone().requires_grad_() for t in plain]
    got = [dtorch.distribute_tensor(t, mesh, placements).requires_grad_() for t in plain]
    want = F.scaled_dot_product_attention(*ref, attn_mask=mask, **options)
    spread = dtorch.Tensor(mask, device_mesh=mesh) if mask is not None else None
    out = F.scaled_dot_product_attention(*got, attn_mask=spread, **options)
    torch.testing.assert_close(out.detach().to_torch(), want.detach(), rtol=1e-5, atol=1e-5)
    out.pow(2).sum().backward()
    want.pow(2).sum().backward()
    for mine, theirs in zip(got, ref, strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "collectives"), [("ulysses_cp", 4, {"all_to_all": 4}), ("ring_cp", 4, {"move": 6})]
)
def test_communication_is_the_textbooks(name: str, size: int, collectives: dict[str, int]) -> None:
    mesh = dtorch.init_device_mesh("cpu", (size,), mesh_dim_names=(name,))
    q, k, v = (dtorch.randn(1, 4, 16, 8, device_mesh=mesh, placements=[dtorch.Shard(2)]) for _ in range(3))
    report = dtorch.explain(F.scaled_dot_product_attention, q, k, v, quiet=True)
    assert report.collectives == collectives
    whole = 4 * 16 * 8 * 4  # bytes of one of the tensors
    if name == "ring_cp":  # every device sends its block of keys and values N - 1 times
        assert report.bytes == 2 * (size - 1) * whole
    else:  # every device keeps one N-th of its piece and sends the rest, of four tensors
        assert report.bytes == 4 * whole * (size - 1) // size
