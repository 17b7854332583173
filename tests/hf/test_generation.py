"""Every way to generate gives plain torch's tokens, and how often the program waits for the workers meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .toys import NEW_TOKENS, generate, moved, on_mesh, prompt, same, toy

MODELS = ("llama", "gpt2", "qwen3_moe")
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "min_p": {"do_sample": True, "min_p": 0.1},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "penalties": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "scores": {"do_sample": False, "output_scores": True, "output_logits": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model_type", MODELS)
def test_same_tokens(model_type: str, strategy: str, padding: int) -> None:
    model, _ = toy("AutoModelForCausalLM", model_type)
    options, inputs = STRATEGIES[strategy], prompt(padding)
    there = on_mesh(model)
    if strategy == "scores" and model_type == "qwen3_moe":
        # Off the CPU, generate runs experts in another way by itself, which rounds differently.
        model = copy.deepcopy(model)
        for m in (model, there):
            m.set_experts_implementation("batched_mm")
    want = generate(model, inputs, **options)
    got = generate(there, moved(inputs), **options)
    if strategy == "scores":
        same([got.sequences, *got.scores, *got.logits], [want.sequences, *want.scores, *want.logits])
    else:
        same(got, want)


@pytest.mark.parametrize("mesh", ["local"], indirect=True)
@pytest.mark.parametrize("strategy", ["sampling", "beams", "static cache"])
def test_same_tokens_in_a_worker_process(strategy: str, mesh: Any) -> None:
    test_same_tokens("llama", strategy, 4)


def test_sampling_depends_on_the_seed() -> None:
    model = on_mesh(toy("AutoModelForCausalLM", "llama")[0])
    first, again, other = (generate(model, moved(prompt()), seed=s, do_sample=True).to_torch() for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_assisted_decoding() -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    assistant, _ = toy("AutoModelForCausalLM", "qwen3")
    inputs = {name: value[1:] for name, value in prompt().items()}
    want = generate(model, inputs, do_sample=False, assistant_model=assistant)
    same(generate(on_mesh(model), moved(inputs), do_sample=False, assistant_model=on_mesh(assistant)), want)


def test_prompt_lookup_decoding() -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    inputs = {name: value[1:].repeat(1, 2) for name, value in prompt().items()}
    want = generate(model, inputs, do_sample=False, prompt_lookup_num_tokens=3)
    same(generate(on_mesh(model), moved(inputs), do_sample=False, prompt_lookup_num_tokens=3), want)


def test_a_cache_is_carried_over() -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    there, inputs = on_mesh(model), prompt()
    want = model(**inputs, use_cache=True)
    got = there(**moved(inputs), use_cache=True)
    step = torch.tensor([[7], [8]])
    more = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    same(
        there(on_mesh(step), attention_mask=on_mesh(more), past_key_values=got.past_key_values).logits,
        model(step, attention_mask=more, past_key_values=want.past_key_values).logits,
    )


def test_stopping_at_the_end_token() -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    inputs = prompt()
    free = generate(model, inputs, do_sample=False)
    end = int(free[0, 12])  # some token that comes up
    want = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end)
    got = on_mesh(model).generate(**moved(inputs), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end)
    same(got, want)


def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TextStreamer

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(320)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3")
    model, _ = toy("AutoModelForCausalLM", "llama")
    inputs = {name: value[1:] for name, value in prompt().items()}

    def printed(m: Any, given: Any) -> str:
        generate(m, given, do_sample=False, streamer=TextStreamer(tokenizer, skip_prompt=True))
        return capsys.readouterr().out

    want = printed(model, inputs)
    assert len(want.split()) == NEW_TOKENS
    assert printed(on_mesh(model), moved(inputs)) == want


# -- synchronising reads -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model_type", [*MODELS, "gemma3_text", "mamba", "mixtral", "qwen3", "deepseek_v3"])
def test_forward_does_not_wait(model_type: str, reads: Callable[[], int]) -> None:
    there = on_mesh(toy("AutoModelForCausalLM", model_type)[0])
    inputs = moved(prompt(padding=4))
    before = reads()
    there(inputs["input_ids"])
    assert reads() == before, "without a mask"
    there(**inputs)
    assert reads() == before, "with a mask"


@pytest.mark.parametrize(
    ("auto", "model_type"),
    [("AutoModelForMaskedLM", "bert"), ("AutoModelForSeq2SeqLM", "t5"), ("AutoModel", "vit"), ("AutoModel", "clip"),
     ("AutoModelForImageTextToText", "llava"), ("AutoModelForSpeechSeq2Seq", "whisper")],
)  # fmt: skip
def test_forward_of_other_models_does_not_wait(auto: str, model_type: str, reads: Callable[[], int]) -> None:
    model, inputs = toy(auto, model_type)
    there, given = on_mesh(model), moved(inputs)
    before = reads()
    there(**given)
    assert reads() == before


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "scores"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_generated_token_waits_once(model_type: str, strategy: str, padding: int, reads: Callable[[], int]) -> None:
    """Generation must know whether all sequences have ended. GPT-2 looks at its mask once more if nothing is padded."""
    there, given = on_mesh(toy("AutoModelForCausalLM", model_type)[0]), moved(prompt(padding))
    counts = []
    for tokens in (3, 9):
        before = reads()
        generate(there, given, tokens=tokens, **STRATEGIES[strategy])
        counts.append(reads() - before)
    assert counts[1] - counts[0] <= 6 * (2 if model_type == "gpt2" and not padding else 1)
    assert counts[0] <= 3 * 2 + 4, "before the first token"
