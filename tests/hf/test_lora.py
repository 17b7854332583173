"""LoRA adapters of peft: on the mesh as on plain torch, trained, merged, saved and loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from .toys import generate, moved, on_mesh, prompt, same, toy


@pytest.fixture
def adapted() -> Any:
    """A toy Llama with adapters whose second matrices are not zero, as they would be at first."""
    from peft import LoraConfig, get_peft_model

    model, _ = toy("AutoModelForCausalLM", "llama")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    torch.manual_seed(0)
    with torch.enable_grad():
        peft = get_peft_model(copy.deepcopy(model), config).eval()
    for name, p in peft.named_parameters():
        if "lora_B" in name:
            p.normal_(std=0.1)
    return peft


def test_forward_and_generate(adapted: Any) -> None:
    there, inputs = on_mesh(adapted), prompt(padding=3)
    same(there(**moved(inputs), use_cache=False), adapted(**inputs, use_cache=False))
    same(generate(there, moved(inputs), do_sample=True), generate(adapted, inputs, do_sample=True))
    with there.disable_adapter(), adapted.disable_adapter():
        same(there(**moved(inputs), use_cache=False), adapted(**inputs, use_cache=False))


def test_training_steps(adapted: Any) -> None:
    there, inputs = on_mesh(adapted), prompt()
    with torch.enable_grad():
        for model, given in ((adapted, inputs), (there, moved(inputs))):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            for _ in range(2):
                model(**given, labels=given["input_ids"]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    trained = [(p, q) for p, q in zip(there.parameters(), adapted.parameters(), strict=True) if q.requires_grad]
    assert len(trained) == 12
    same([p.detach() for p, _ in trained], [q.detach() for _, q in trained])


def test_merging(adapted: Any) -> None:
    there, inputs = on_mesh(adapted), prompt()
    same(there.merge_and_unload()(**moved(inputs)).logits, adapted.merge_and_unload()(**inputs).logits)


@pytest.mark.parametrize("first", ["dtorch", "cpu"])
def test_saving_and_loading(first: str, adapted: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted_there = on_mesh(adapted) if first == "dtorch" else adapted
    adapted_there.save_pretrained(tmp_path)
    base, _ = toy("AutoModelForCausalLM", "llama")
    plain = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    there = PeftModel.from_pretrained(on_mesh(base), tmp_path).eval()
    assert {p.device.type for p in there.parameters()} == {"dtorch"}
    inputs = prompt()
    want = adapted(**inputs).logits
    assert torch.equal(plain(**inputs).logits, want)
    same(there(**moved(inputs)).logits, want)


def test_a_second_adapter(adapted: Any) -> None:
    from peft import LoraConfig

    there, inputs = on_mesh(adapted), prompt()
    for model in (adapted, there):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"]))
        model.set_adapter("second")
    assert {p.device.type for p in there.parameters()} == {"dtorch"}
    same(there(**moved(inputs)).logits, adapted(**inputs).logits)  # its second matrices are zero
