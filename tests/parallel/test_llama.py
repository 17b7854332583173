"""Our own Llama against transformers', over layouts; and the hooks of ``dtorch.nn.Module``."""

from __future__ import annotations

import pytest
import torch
import transformers

import dtorch
from dtorch.models.llama import Llama, LlamaSettings
from dtorch.nn import ColumnParallelLinear, Module, RowParallelLinearWithReplicateOutput

SETTINGS = LlamaSettings(num_hidden_layers=4, num_key_value_heads=2)
IDS = torch.randint(0, 250, (4, 10), generator=torch.Generator().manual_seed(0))
LAYOUTS = [
    {"dp": 1}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"ulysess_cp": 2}, {"ring_cp": 2}, {"tp": 4}, {"ring_cp": 3},
    {"dp": 2, "tp": 2, "pp": 2}, {"pp": 2, "ulysses_cp": 2, "ring_cp": 2}, {"dp": 2, "tp": 2, "pp": 2, "ulysses_cp": 2, "ring_cp": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    s = SETTINGS
    config = transformers.LlamaConfig(
        vocab_size=s.vocab_size, hidden_size=s.hidden_size, intermediate_size=s.intermediate_size,
        num_hidden_layers=s.num_hidden_layers, num_attention_heads=s.num_attention_heads,
        num_key_value_heads=s.num_key_value_heads, rms_norm_eps=s.rms_norm_eps,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logits(layout: dict[str, int], reference: transformers.LlamaForCausalLM) -> None:
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    model = Llama(SETTINGS, mesh)
    state = {k.removeprefix("model."): v for k, v in reference.state_dict().items()}
    model.load_state_dict(state)
    with torch.no_grad():
        want = reference(IDS, use_cache=False).logits
        torch.testing.assert_close(model(IDS).to_torch(), want, rtol=1e-4, atol=1e-4)


def test_hooks_and_layers() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with mesh:
        first, second = ColumnParallelLinear(8, 12), RowParallelLinearWithReplicateOutput(12, 8)

    class Block(Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return second(first(x).relu())

    block = Block()
    block.redistribute_input({"dp": dtorch.Shard(0)}, mesh)
    block.redistribute_output({"dp": dtorch.Replicate()})
    x = torch.randn(6, 8)
    got = block(x)
    assert list(got.placements) == [dtorch.Replicate(), dtorch.Replicate()]
    assert list(first(dtorch.Tensor(x, device_mesh=mesh)).placements) == [dtorch.Replicate(), dtorch.Shard(1)]
    w1, b1, w2, b2 = (p.to_torch() for p in (first.weight, first.bias, second.weight, second.bias))
    want = (x @ w1.t() + b1).relu() @ w2.t() + b2
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-5, atol=1e-5)
