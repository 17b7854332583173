"""Whole models over every layout: the logits, the loss and the weights after training are plain torch's."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch.models.llama import Llama, LlamaSettings

AXES = ("dp", "pp", "tp", "ulysses_cp", "ring_cp")


def factorisations(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    for sizes in itertools.product([n for n in range(1, count + 1) if count % n == 0], repeat=axes):
        product = 1
        for n in sizes:
            product *= n
        if product == count:
            yield sizes


def model(kind: str, layers: int = 8) -> torch.nn.Module:
    import transformers

    config, cls = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(0)
    options: dict[str, Any] = {"head_dim": 8} if kind == "qwen3" else {}
    return cls(
        config(
            hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8,
            vocab_size=160, **options,
        )
    ).eval()  # fmt: skip


IDS = torch.randint(3, 150, (8, 16), generator=torch.Generator().manual_seed(1))


@functools.cache
def expected(kind: str, layers: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """A plain model and its logits."""
    plain = model(kind, layers)
    with torch.no_grad():
        return plain, plain(IDS, use_cache=False).logits


def own_llama(plain: Any, mesh: dtorch.DeviceMesh) -> torch.nn.Module:
    c = plain.config
    settings = LlamaSettings(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, rms_norm_eps=c.rms_norm_eps,
    )  # fmt: skip
    own = Llama(settings, mesh)
    own.load_state_dict({k.removeprefix("model."): v for k, v in plain.state_dict().items()})
    return own


def check_logits(kind: str, sizes: tuple[int, ...]) -> None:
    layers = max(2, sizes[AXES.index("pp")])
    plain, want = expected("llama" if kind == "own" else kind, layers)
    mesh = dtorch.init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    with torch.no_grad():
        if kind == "own":
            got = own_llama(plain, mesh)(IDS)
        else:
            got = dtorch.parallelize(copy.deepcopy(plain), mesh)(IDS, use_cache=False).logits
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["own", "llama", "qwen3"])
@pytest.mark.parametrize("sizes", list(factorisations(8, 5)), ids=lambda s: "-".join(map(str, s)))
def test_every_factorisation_of_eight_devices(kind: str, sizes: tuple[int, ...]) -> None:
    check_logits(kind, sizes)


@pytest.mark.parametrize("kind", ["own", "llama", "qwen3"])
def test_five_axes_of_two(kind: str) -> None:
    check_logits(kind, (2,) * 5)


TRAINED = [
    ({"dp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3), ({"tp": 2}, 0), ({"pp": 2}, 0), ({"ulysses_cp": 2}, 0),
    ({"ring_cp": 2}, 0), ({"dp": 2, "tp": 2, "pp": 2}, 0), ({"dp": 2, "tp": 2}, 3), ({"dp": 2, "ring_cp": 2}, 3),
    ({"pp": 2, "tp": 2, "ulysses_cp": 2}, 0), ({"dp_replicate": 2, "dp_shard": 2}, 3),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "zero"), TRAINED, ids=str)
def test_training(layout: dict[str, int], zero: int) -> None:
    plain = model("llama", layers=2).train()
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    placed = dtorch.parallelize(copy.deepcopy(plain), mesh, zero=zero)
    losses: list[list[float]] = []
    for m in (plain, placed):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
        losses.append([])
        for _ in range(5):
            loss = m(IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.to_torch(), theirs, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2}, {"ulysses_cp": 2, "tp": 2}], ids=str)
def test_sequence_parallelism(layout: dict[str, int]) -> None:
    plain = model("llama", layers=2).train()
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    placed = dtorch.parallelize(copy.deepcopy(plain), mesh, sequence_parallel=True)
    for rows, length in ((2, 7), (1, 1)):  # also what does not divide
        ids = IDS[:rows, :length]
        losses = [m(ids, labels=ids, use_cache=False).logits.pow(2).mean() for m in (plain, placed)]
        torch.testing.assert_close(losses[1].detach().to_torch(), losses[0].detach(), rtol=1e-4, atol=1e-5)
        for loss in losses:
            loss.backward()
    for mine, theirs in zip(placed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-3, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"plan": "worst"}, "'auto', 'best' or a dict"),
    ({"plan": 3}, "'auto', 'best' or a dict"),
    ({"plan": {"model.layers.*.self_attn.q_proj": "colwize"}}, "'colwize' is no known style"),
    ({"plan": {"model.layer.*.q_proj": "colwise"}}, "no module or parameter of that name"),
    ({"microbatches": 2.5}, "microbatches=2.5: use a whole number"),
    ({"chunks": 0}, "chunks=0"),
    ({"zero": "1"}, "zero='1'"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED, ids=str)
def test_what_cannot_work_is_refused_before_anything_is_placed(options: dict[str, Any], why: str) -> None:
    plain = model("llama", layers=2)
    with pytest.raises(dtorch.PlacementError, match=why):
        dtorch.parallelize(plain, dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), **options)
    assert not any(isinstance(p.data, dtorch.Tensor) for p in plain.parameters())


def test_plans_of_torch_may_ask_for_sequence_parallelism() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    plain = model("llama", layers=2)
    plan = {
        "model.layers.*.input_layernorm": SequenceParallel(), "model.layers.*.self_attn.q_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    }  # fmt: skip
    mesh = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.no_grad():
        want = plain(IDS, use_cache=False).logits
        report = dtorch.explain(dtorch.parallelize(plain, mesh, plan), IDS, use_cache=False, quiet=True)
    torch.testing.assert_close(report.result.logits.to_torch(), want, rtol=1e-4, atol=1e-4)
    assert report.collectives["reduce_scatter"] == 2
