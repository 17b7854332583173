"""Expert parallelism against plain torch: logits, gradients, and what is communicated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import dtorch

KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
LAYOUTS = [{"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2, "ep": 2}]
EXPERTS, HIDDEN, CHOICES, LAYERS = 8, 32, 2, 2
IDS = torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(1))


def model(kind: str) -> Any:
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 96, "num_experts_per_tok": CHOICES,
    }  # fmt: skip
    config: Any
    if kind == "mixtral":
        config = transformers.MixtralConfig(**common, num_local_experts=EXPERTS)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, head_dim=8, num_experts=EXPERTS, moe_intermediate_size=24)
    elif kind == "gpt_oss":
        config = transformers.GptOssConfig(**common, head_dim=8, num_local_experts=EXPERTS)
    else:
        common["num_key_value_heads"] = 4
        config = transformers.DeepseekV3Config(
            **common, n_routed_experts=EXPERTS, moe_intermediate_size=24, q_lora_rank=16, kv_lora_rank=8,
            qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=1,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def placed(module: Any, layout: dict[str, int]) -> Any:
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    return dtorch.parallelize(copy.deepcopy(module), mesh)


def check(plain: Any, layout: dict[str, int], batch: torch.Tensor) -> None:
    """Logits and gradients."""
    parallel = placed(plain, layout)
    plain.zero_grad()
    want, got = plain(batch, use_cache=False).logits, parallel(batch, use_cache=False).logits
    torch.testing.assert_close(got.to_torch(), want.detach(), rtol=1e-4, atol=1e-4)
    want.pow(2).mean().backward()
    got.pow(2).mean().backward()
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_models(kind: str, layout: dict[str, int]) -> None:
    check(model(kind), layout, IDS)


@pytest.mark.parametrize("rows", [1, 3], ids=["tokens on every device", "tokens cut unevenly"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_batches(kind: str, rows: int) -> None:
    check(model(kind), {"ep": 2}, IDS[:rows])


def test_generation() -> None:
    plain = model("mixtral").eval()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    want = plain.generate(IDS, **options)
    assert torch.equal(placed(plain, {"ep": 2}).generate(IDS.to("dtorch"), **options).to_torch(), want)


@pytest.mark.parametrize("devices", [2, 4])
def test_one_reduction_joins_experts_where_every_device_has_the_tokens(devices: int) -> None:
    plain = model("mixtral").eval()
    parallel = placed(plain, {"ep": devices})
    with torch.no_grad():
        report = dtorch.explain(parallel, IDS[:1], use_cache=False, quiet=True)
    assert report.collectives == {"all_reduce": LAYERS}
    assert report.bytes == LAYERS * 2 * (devices - 1) * IDS.shape[1] * HIDDEN * 4


@pytest.mark.parametrize("devices", [2, 4])
def test_tokens_cut_along_ep_go_by_all_to_all(devices: int) -> None:
    plain = model("mixtral").eval()
    parallel = placed(plain, {"ep": devices})
    with torch.no_grad():
        report = dtorch.explain(parallel, IDS, use_cache=False, quiet=True)
    # There: tokens, numbers of experts and weights; and back. The reductions say how much room there must be.
    assert report.collectives == {"all_to_all": 4 * LAYERS, "all_reduce": LAYERS}
    moved = [m for line in report.lines for m in line.moves if m.kind == "all_to_all"]
    per_token = HIDDEN * 4 + CHOICES * 8 + CHOICES * 4 + HIDDEN * 4
    places = [sum(m.bytes for m in moved[4 * k : 4 * k + 4]) / per_token for k in range(LAYERS)]
    tokens = IDS.numel() // devices
    for sent in places:  # by all devices to all others
        assert 0 < sent <= devices * (devices - 1) * tokens
    assert min(places) < devices * (devices - 1) * tokens  # fewer than all tokens to everyone
    gathered = sum(m.bytes for line in report.lines for m in line.moves if m.kind == "all_reduce")
    assert gathered == LAYERS * 2 * (devices - 1) * 8


def test_no_token_is_dropped_when_all_go_to_one_expert() -> None:
    plain = model("mixtral").eval()
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[5] = 1.0
        want = plain(IDS, use_cache=False).logits
        got = placed(plain, {"ep": 4})(IDS, use_cache=False).logits
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-4, atol=1e-4)


def test_the_eager_loop_still_runs() -> None:
    plain = model("qwen3_moe").eval()
    plain.set_experts_implementation("eager")
    with torch.no_grad():
        want = plain(IDS, use_cache=False).logits
        got = placed(plain, {"ep": 2})(IDS, use_cache=False).logits
    torch.testing.assert_close(got.to_torch(), want, rtol=1e-4, atol=1e-4)


def test_several_axes_of_experts() -> None:
    plain = model("mixtral")
    for layout in ({"ep": 2, "ep_inner": 2}, {"dp": 2, "pp": 2, "ep": 2}):
        check(plain, layout, IDS)


def test_experts_that_do_not_divide() -> None:
    plain = model("mixtral")
    (note,) = dtorch.describe(placed(plain, {"ep": 3})).notes
    assert "8 experts do not divide by ep=3" in note
    check(plain, {"ep": 3}, IDS)
    with pytest.raises(dtorch.PlacementError, match="8 experts, which cannot be spread over 16 devices"):
        placed(plain, {"ep": 16})


def test_experts_hold_their_share() -> None:
    parallel = placed(model("mixtral"), {"ep": 4})
    for row in dtorch.describe(parallel).rows:
        if ".experts." in row.name:
            assert set(row.bytes_by_device.values()) == {torch.Size(row.shape).numel() * 4 // 4}


def test_data_parallel_devices_sort_their_own_tokens() -> None:
    plain = model("mixtral").eval()
    parallel = placed(plain, {"dp": 2})
    with torch.no_grad():
        report = dtorch.explain(parallel, IDS, use_cache=False, quiet=True)
    assert report.collectives == {}
    check(plain, {"dp": 2}, IDS)
