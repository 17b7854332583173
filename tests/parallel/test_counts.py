"""What a layer communicates in each layout is what the papers say: the collectives, and their bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import dtorch
from dtorch.models.llama import Llama, LlamaSettings

BATCH, SEQUENCE, HIDDEN, HEADS, LAYERS, VOCABULARY = 2, 16, 32, 4, 2, 96
IDS = torch.randint(3, 90, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(1))
# Of one layer's activations, and of its queries, keys or values, which are as large here.
ACTIVATION_BYTES = BATCH * SEQUENCE * HIDDEN * 4


def report(kind: str, layout: dict[str, int], **options: Any) -> dtorch.Explanation:
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "vocab_size": VOCABULARY,
    }  # fmt: skip
    with torch.no_grad():
        if kind == "own":
            return dtorch.explain(Llama(LlamaSettings(**sizes), mesh), IDS, quiet=True)
        module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
        return dtorch.explain(dtorch.parallelize(module, mesh, **options), IDS, use_cache=False, quiet=True)


@pytest.mark.parametrize("kind", ["own", "transformers"])
@pytest.mark.parametrize("devices", [2, 4])
def test_tensor_parallel_layers_reduce_twice(kind: str, devices: int) -> None:
    got = report(kind, {"tp": devices})
    # After attention and after the feed-forward part (Shoeybi et al., Megatron-LM, 2019), and after the embedding.
    assert got.collectives == {"all_reduce": 2 * LAYERS + 1}
    # A ring's all-reduce: each device sends 2 (N - 1) / N of the whole.
    assert got.bytes == (2 * LAYERS + 1) * 2 * (devices - 1) * ACTIVATION_BYTES


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4}], ids=str)
def test_sequence_parallel_layers_scatter_and_gather_instead(layout: dict[str, int]) -> None:
    devices = layout["tp"]
    got = report("transformers", layout, sequence_parallel=True)
    # Two of each for a layer (Korthikanti et al., 2022): the bytes of an all-reduce. One more for embedding and head.
    assert got.collectives == {"reduce_scatter": 2 * LAYERS + 1, "all_gather": 2 * LAYERS + 1}
    assert got.bytes == (2 * LAYERS + 1) * 2 * (devices - 1) * ACTIVATION_BYTES
    norms = [line for line in got.lines if line.op.startswith("aten.rsqrt")]
    assert norms
    assert all("Shard(dim=1)" in text for line in norms for text in line.outputs)


@pytest.mark.parametrize("kind", ["own", "transformers"])
@pytest.mark.parametrize("devices", [2, 4])
def test_ulysses_layers_exchange_four_times(kind: str, devices: int) -> None:
    got = report(kind, {"ulysses_cp": devices})
    # Query, key and value to heads, the result back (Jacobs et al., DeepSpeed Ulysses, 2023).
    assert got.collectives == {"all_to_all": 4 * LAYERS}
    assert got.bytes == 4 * LAYERS * ACTIVATION_BYTES * (devices - 1) // devices


@pytest.mark.parametrize("kind", ["own", "transformers"])
@pytest.mark.parametrize("devices", [2, 4])
def test_ring_layers_send_keys_and_values_round(kind: str, devices: int) -> None:
    got = report(kind, {"ring_cp": devices})
    # N - 1 sends of each device's block of keys, and of values (Liu et al., Ring Attention, 2023).
    assert got.collectives == {"move": 2 * (devices - 1) * LAYERS}
    assert got.bytes == 2 * (devices - 1) * LAYERS * ACTIVATION_BYTES


def test_data_parallel_layers_send_nothing_forward_and_one_gradient_back() -> None:
    devices = 2
    mesh = dtorch.init_device_mesh("cpu", (devices,), mesh_dim_names=("dp",))
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=VOCABULARY
    )
    module = dtorch.parallelize(transformers.LlamaForCausalLM(config), mesh)
    forward = dtorch.explain(module, IDS, use_cache=False, quiet=True)
    assert forward.collectives == {}

    def step() -> None:
        forward.result.logits.pow(2).sum().backward()
        for p in module.parameters():
            assert p.grad is not None
            p.grad.redistribute(placements=[dtorch.Replicate()])

    backward = dtorch.explain(step, quiet=True)
    parameters = list(module.parameters())
    assert backward.collectives == {"all_reduce": len(parameters)}
    assert backward.bytes == sum(2 * (devices - 1) * p.numel() * 4 for p in parameters)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_stages_hand_on_activations(layout: dict[str, int]) -> None:
    got = report("own", layout)
    assert got.collectives == {"move": 1}
    assert got.bytes == ACTIVATION_BYTES
