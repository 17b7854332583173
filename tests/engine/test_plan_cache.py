"""How often calls are planned: not again in a loop, nor while only sizes grow."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from tests.engine.helpers import P, R, full, mesh, spread


def _planned() -> int:
    return dtorch.plan_stats()["planned"]


@pytest.fixture(scope="module")
def llama() -> Any:
    """A toy Llama on plain torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=64, max_position_embeddings=128,
        )).eval()  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("axis", "parts"), [("tp", 1), ("tp", 2), ("dp", 2)])
def test_growing_cache(llama: Any, axis: str, parts: int) -> None:
    """With a cache that grows by one nothing is planned after the fourth token, whatever sizes it passes on the way;
    but for the flag that the last one sets."""
    on = dtorch.init_device_mesh("cpu", (parts,), mesh_dim_names=(axis,))
    ids = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 28, "min_new_tokens": 28, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), on:
        want = llama.generate(ids, attention_mask=torch.ones_like(ids), **options)
        model = dtorch.parallelize(copy.deepcopy(llama), on)
        counts: list[int] = []
        model.register_forward_pre_hook(lambda *_: counts.append(_planned()))
        there = ids.to("dtorch")
        got = model.generate(there, attention_mask=torch.ones_like(there), **options)
    assert len(counts) == 28
    assert len(set(counts[4:])) == 1, [b - a for a, b in pairwise(counts)]
    assert dtorch.plan_stats()["derived"] > 20
    assert torch.equal(full(got), want)


def test_a_reduction_is_planned_once() -> None:
    """A Partial argument is reduced in place of itself; that this is to be done is remembered like any plan."""
    on, x = mesh(2), torch.ones(4, 4)
    counts = []
    for _ in range(4):
        y = spread(x, on, Shard(1)) @ spread(x, on, Shard(0))
        assert list(y.placements) == [P]
        z = y + spread(x, on, R)
        assert list(y.placements) == [R]
        counts.append(_planned())
    assert counts[1] == counts[3]
    assert torch.equal(full(z), x @ x + x)


def test_reduced_within_the_plan_where_memory_is_shared() -> None:
    """A tensor with views stays Partial, although a call like it reduced its argument before."""
    on, x = mesh(2), torch.ones(4, 4)
    for viewed in (False, True, False, True):
        y = spread(x, on, Shard(1)) @ spread(x, on, Shard(0))
        view = y.view(16) if viewed else None
        z = y + spread(x, on, R)
        assert list(y.placements) == [P if viewed else R]
        assert torch.equal(full(z), x @ x + x)
        assert view is None or torch.equal(full(view), (x @ x).view(16))


def test_counts() -> None:
    """What is planned and what is told from other sizes."""
    on = mesh(1)
    inputs = [spread(torch.ones(2, n), on, Replicate()) for n in range(3, 8)]
    before = dtorch.plan_stats()
    for x in inputs:
        x.mul(x)
        x.mul(x)
    after = dtorch.plan_stats()
    assert {k: after[k] - before[k] for k in after} == {"planned": 3, "derived": 2}
