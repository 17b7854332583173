"""diffusers' transformers, unmodified, in every layout: values of plain torch, and the collectives of the textbook."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel

import dtorch

Case = tuple[torch.nn.Module, dict[str, Any]]


def _sd3() -> Case:
    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([3.0, 3.0]),
    }  # fmt: skip


def _flux() -> Case:
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 8), "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.3]),
        "img_ids": torch.randn(16, 3), "txt_ids": torch.randn(7, 3),
    }  # fmt: skip


def _qwen() -> Case:
    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=4,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 6, 16),
        "encoder_hidden_states_mask": torch.ones(2, 6, dtype=torch.long), "timestep": torch.tensor([0.3, 0.3]),
        "img_shapes": [[(1, 4, 4)]] * 2,
    }  # fmt: skip


def _wan() -> Case:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 16),
        "timestep": torch.tensor([3.0, 3.0]),
    }  # fmt: skip


MODELS: dict[str, Callable[[], Case]] = {"sd3": _sd3, "flux": _flux, "qwen": _qwen, "wan": _wan}
LAYOUTS: list[dict[str, int]] = [
    {"dp": 2}, {"tp": 2}, {"pp": 2}, {"ulysses_cp": 2}, {"ring_cp": 2}, {"ulysses_cp": 3}, {"ring_cp": 4},
    {"ulysses_cp": 2, "ring_cp": 2}, {"tp": 2, "ring_cp": 2}, {"dp": 2, "ulysses_cp": 2, "tp": 2},
    {"dp": 2, "pp": 2, "tp": 2}, {"pp": 2, "ulysses_cp": 2}, {"tp": 2, "pp": 2, "ring_cp": 2, "ulysses_cp": 2},
]  # fmt: skip


def _run(name: str, layout: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor, dtorch.Explanation]:
    """Plain torch's result, ours, and what was done for it."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with torch.no_grad():
        want = model(**inputs, return_dict=False)[0]
        mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
        dtorch.parallelize(model, mesh)
        explained = dtorch.explain(lambda: model(**inputs, return_dict=False)[0])
        return want, explained.result.to_torch(), explained


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()))
@pytest.mark.parametrize("name", MODELS)
def test_values(name: str, layout: dict[str, int]) -> None:
    want, got, _ = _run(name, layout)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# Attentions: sd3 2; flux 2 double and 2 single; wan 2 and 2 across, whose keys and values are whole. Outputs of sharded
# linears: sd3 4 in its first block and 3 in its last, which ends with the image; flux 4 in a double block, 1 in a single.
@pytest.mark.parametrize(
    ("name", "layout", "counts"),
    [
        ("sd3", {"ulysses_cp": 2}, {"all_to_all": 2 * 4}),
        ("sd3", {"ring_cp": 4}, {"move": 2 * 3 * 2}),
        ("sd3", {"tp": 2}, {"all_reduce": 4 + 3}),
        ("flux", {"ulysses_cp": 2}, {"all_to_all": 4 * 4}),
        ("flux", {"ring_cp": 4}, {"move": 4 * 3 * 2}),
        ("flux", {"ring_cp": 2, "ring_cp_outer": 2}, {"move": 4 * 3 * 2}),
        ("flux", {"tp": 2}, {"all_reduce": 2 * 4 + 2 * 1}),
        ("wan", {"ulysses_cp": 2}, {"all_to_all": 2 * 4 + 2 * 2}),
    ],
)
def test_communication(name: str, layout: dict[str, int], counts: dict[str, int]) -> None:
    """Per attention, Ulysses exchanges query, keys, values and result, and a ring sends keys and values n - 1 times;
    no sequence is gathered but the result at the end."""
    found = _run(name, layout)[2].collectives
    assert found.pop("all_gather", 0) <= len(layout)
    assert found == counts


@pytest.mark.parametrize("layout", [{"ulysses_cp": 2}, {"ring_cp": 2}, {"ulysses_cp": 2, "ring_cp": 2}], ids=str)
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_no_device_holds_the_joint_sequence(name: str, layout: dict[str, int]) -> None:
    """23 tokens of text and image: whatever has a dimension of that size is cut along it. Ulysses' own exchange, inside
    of the attention, is the exception."""
    found = 0
    for line in _run(name, layout)[2].lines:
        for text in line.outputs:
            shape = [int(n) for n in re.findall(r"\d+", text[: text.index(")")])]
            if 23 in shape and "embeddings" not in line.site:
                found += 1
                cut = re.findall(r"Shard\(dim=(\d+)", text)
                assert cut == [str(shape.index(23))] * len(layout), f"{line.op} {text} {line.site}"
    assert found > 10
