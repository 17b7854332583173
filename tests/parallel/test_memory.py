"""What devices hold in each layout, as their workers count it: one worker a device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import transformers

import dtorch

DEVICES = 4


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(mode="local", workers=DEVICES, threads=1)
    yield
    dtorch.shutdown()


@pytest.fixture(autouse=True)
def inline() -> None:
    """Instead of the folder's own: these tests share the workers above."""


def live() -> list[int]:
    return [stats.live_bytes for stats in dtorch.memory_stats()]


def mesh_of(name: str) -> dtorch.DeviceMesh:
    return dtorch.init_device_mesh("cpu", (DEVICES,), mesh_dim_names=(name,))


def test_live_and_peak() -> None:
    mesh = mesh_of("tp")
    x = dtorch.zeros(DEVICES * 256, device_mesh=mesh, placements=[dtorch.Shard(0)])
    before = live()
    assert len(before) == DEVICES
    dtorch.reset_peak_memory_stats()
    y = x + 1
    view = y[0:]  # shares memory, and so adds nothing
    assert [b - a for a, b in zip(before, live(), strict=True)] == [1024] * DEVICES
    z = y * 2
    del y, view, z
    assert live() == before
    for a, stats in zip(before, dtorch.memory_stats(), strict=True):
        assert stats.peak_bytes == a + 2048
    (only,) = dtorch.memory_stats(2)
    assert 2 in only.devices
    with pytest.raises(dtorch.DtorchError, match="No worker hosts device 9"):
        dtorch.memory_stats(9)


def test_tensor_parallel_models_hold_their_share() -> None:
    mesh = mesh_of("tp")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=512
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    parameters = sum(p.numel() * p.element_size() for p in plain.parameters())
    dtorch.ones(1, device_mesh=mesh).item()
    before = live()
    model = dtorch.parallelize(plain, mesh)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.int64)).logits.to_torch()
    for a, b in zip(before, live(), strict=True):
        assert parameters * 0.25 <= b - a <= parameters * 0.27


@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention_holds_its_share(causal: bool) -> None:
    mesh = mesh_of("ring_cp")
    shape = (1, 8, 1024, 64)
    one_device = 2 * torch.Size(shape).numel() * 4  # keys and values
    query = dtorch.zeros(*shape, device_mesh=mesh, placements=[dtorch.Shard(2)])
    before = live()
    key, value = (dtorch.randn(*shape, device_mesh=mesh, placements=[dtorch.Shard(2)]) for _ in range(2))
    result = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    dtorch.reset_peak_memory_stats()
    del result
    result = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    for a, stats in zip(before, dtorch.memory_stats(), strict=True):
        assert stats.peak_bytes is not None
        own = stats.peak_bytes - a - result.nbytes // DEVICES
        # Its quarter, and what is in flight: parts of the blocks.
        assert 0.25 * one_device < own <= 0.35 * one_device
    assert list(result.placements) == [dtorch.Shard(2)]


def test_what_a_move_makes_counts_as_long_as_it_lives() -> None:
    mesh = mesh_of("tp")
    x = dtorch.zeros(DEVICES * 256, device_mesh=mesh, placements=[dtorch.Shard(0)])
    w = dtorch.ones(DEVICES * 256, device_mesh=mesh)
    before = live()
    dtorch.reset_peak_memory_stats()
    y = torch.flip(x, [0]) * w  # flipped, it is gathered first
    del y
    assert live() == before
    for a, stats in zip(before, dtorch.memory_stats(), strict=True):
        assert stats.peak_bytes is not None
        assert stats.peak_bytes >= a + DEVICES * 1024


def test_ring_attention_of_values_that_one_device_lost() -> None:
    """Its worker takes part in all sends, of parts of blocks as well, and the error says what was lost."""
    mesh = mesh_of("ring_cp")
    shape = (1, 8, DEVICES * 256, 64)
    query, value = (dtorch.zeros(*shape, device_mesh=mesh, placements=[dtorch.Shard(2)]) for _ in range(2))
    rows = torch.arange(DEVICES * 256).clamp(max=DEVICES * 256 - 1)
    rows[-1] = DEVICES * 256  # beyond the table
    table = dtorch.zeros(DEVICES * 256, 64, device_mesh=mesh)
    looked_up = F.embedding(dtorch.distribute_tensor(rows, mesh, [dtorch.Shard(0)]), table)
    key = looked_up.view(1, 1, -1, 64).expand(1, 8, -1, -1)
    result = F.scaled_dot_product_attention(query, key, value)
    with pytest.raises(IndexError, match="out of range"):
        result.to_torch()
    F.scaled_dot_product_attention(query, value, value).to_torch()  # and all goes on
