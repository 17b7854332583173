"""One architecture of each kind: every tensor that forward returns, and the tokens generated, as on plain torch.

``benchmarks/hf_sweep.py`` does the same for every architecture that transformers has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .toys import generate, moved, on_mesh, prompt, same, toy

CAUSAL = ("llama", "qwen3", "gpt2", "mixtral", "deepseek_v3", "gemma3_text", "mamba", "qwen3_next", "bloom", "gpt_oss")
OTHERS = (
    ("AutoModelForMaskedLM", "bert"),
    ("AutoModel", "deberta-v2"),
    ("AutoModelForSeq2SeqLM", "t5"),
    ("AutoModelForSeq2SeqLM", "bart"),
    ("AutoModelForSpeechSeq2Seq", "whisper"),
    ("AutoModelForCTC", "wav2vec2"),
    ("AutoModelForImageClassification", "vit"),
    ("AutoModelForImageClassification", "convnext"),
    ("AutoModel", "clip"),
    ("AutoModel", "siglip"),
    ("AutoModel", "dinov2"),
    ("AutoModelForMaskGeneration", "sam"),
    ("AutoModelForImageTextToText", "llava"),
    ("AutoModelForImageTextToText", "qwen2_vl"),
    ("AutoModel", "encodec"),
)


@pytest.mark.parametrize("model_type", CAUSAL)
def test_causal_language_model(model_type: str, reads: Callable[[], int]) -> None:
    model, _ = toy("AutoModelForCausalLM", model_type)
    there = on_mesh(model)
    inputs = prompt(padding=3)
    ids = inputs["input_ids"]
    same(there(on_mesh(ids), use_cache=False), model(ids, use_cache=False))
    same(there(**moved(inputs), use_cache=False), model(**inputs, use_cache=False))
    same(generate(there, moved(inputs), do_sample=False), generate(model, inputs, do_sample=False))


@pytest.mark.parametrize(("auto", "model_type"), OTHERS, ids=[f"{t}-{a[9:]}" for a, t in OTHERS])
def test_other_model(auto: str, model_type: str) -> None:
    model, inputs = toy(auto, model_type)
    there = on_mesh(model)
    torch.manual_seed(3)
    want = model(**inputs)
    torch.manual_seed(3)
    same(there(**moved(inputs)), want)
    if model.can_generate():
        given = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
        same(generate(there, moved(given), do_sample=False), generate(model, given, do_sample=False))


@pytest.mark.parametrize("mesh", ["local"], indirect=True)
@pytest.mark.parametrize(("auto", "model_type"), [("AutoModelForCausalLM", "llama"), ("AutoModelForSeq2SeqLM", "t5")])
def test_in_a_worker_process(auto: str, model_type: str, mesh: Any) -> None:
    test_other_model(auto, model_type)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_forward_in_every_gradient_mode(model_type: str, attention: str, context: Any) -> None:
    model, _ = toy("AutoModelForCausalLM", model_type)
    there = on_mesh(model)
    inputs = prompt(padding=3)
    before = model.config._attn_implementation
    for m in (model, there):
        m.set_attn_implementation(attention)
    try:
        with context():
            same(there(**moved(inputs), use_cache=False).logits, model(**inputs, use_cache=False).logits)
    finally:
        model.set_attn_implementation(before)


def test_bfloat16() -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    there = on_mesh(model).to(torch.bfloat16)
    inputs = prompt(padding=3)
    same(there(**moved(inputs), use_cache=False), on_host_in_bfloat16(model)(**inputs, use_cache=False))


def on_host_in_bfloat16(model: Any) -> Any:
    import copy

    return copy.deepcopy(model).to(torch.bfloat16)


def test_switching_the_fused_attention_off_holds_on_workers(mesh: Any) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, _ = toy("AutoModelForCausalLM", "llama")
    there = on_mesh(model)
    inputs = prompt()
    with sdpa_kernel(SDPBackend.MATH):
        same(there(**moved(inputs), use_cache=False), model(**inputs, use_cache=False))
