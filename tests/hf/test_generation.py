"""Every way to generate gives plain torch's tokens, and how often the program waits for the workers meanwhile."""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
ENCODER_DECODERS = [
    ("AutoModelForSeq2SeqLM", "t5"), ("AutoModelForSeq2SeqLM", "bart"), ("AutoModelForSpeechSeq2Seq", "whisper"),
    ("AutoModelForImageTextToText", "llava"),
]  # fmt: skip


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


def watermark() -> Any:
    from transformers import SynthIDTextWatermarkingConfig

    return SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)


VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "named dynamic cache": lambda: {"cache_implementation": "dynamic"},
    "static cache, beams": lambda: {"num_beams": 3, "cache_implementation": "static"},
    "static cache, sampling": lambda: {"do_sample": True, "cache_implementation": "static"},
    "prompt in pieces": lambda: {"prefill_chunk_size": 4},
    "typical": lambda: {"do_sample": True, "typical_p": 0.9, "renormalize_logits": True},
    "guidance": lambda: {"guidance_scale": 1.5},
    "forbidden tokens": lambda: {"bad_words_ids": [[5], [7, 8]], "suppress_tokens": [11], "sequence_bias": [[[9], 3.0]]},
    "watermark": lambda: {"do_sample": True, "watermarking_config": watermark()},
    "beam scores": lambda: {
        "num_beams": 3, "length_penalty": 0.5, "early_stopping": True, "output_scores": True,
        "return_dict_in_generate": True,
    },
    "attentions": lambda: {
        "output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True, "use_cache": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    model, inputs, options = toy("AutoModelForCausalLM", "llama")[0], prompt(padding=4), {"do_sample": False}
    if variant == "attentions":
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
    options |= VARIANTS[variant]()
    want, got = generate(model, inputs, **options), generate(on_mesh(model), moved(inputs), **options)
    same(got, want)


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "beams", "sampled beams", "penalties", "static cache"])
@pytest.mark.parametrize(("auto", "model_type"), ENCODER_DECODERS)
def test_encoder_decoders(auto: str, model_type: str, strategy: str, reads: Callable[[], int]) -> None:
    model, inputs = toy(auto, model_type)
    there = on_mesh(model)
    given = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    options = STRATEGIES[strategy]
    same(generate(there, moved(given), **options), generate(model, given, **options))
    counts = []
    for tokens in (3, 9):
        before = reads()
        generate(there, moved(given), tokens=tokens, **options)
        counts.append(reads() - before)
    assert counts[1] - counts[0] <= 6


@pytest.mark.parametrize("mesh", ["local"], indirect=True)
@pytest.mark.parametrize("strategy", ["sampling", "beams", "static cache"])
def test_same_tokens_in_a_worker_process(strategy: str, mesh: Any) -> None:
    test_same_tokens("llama", strategy, 4)


def test_sampling_depends_on_the_seed() -> None:
    model = on_mesh(toy("AutoModelForCausalLM", "llama")[0])
    first, again, other = (generate(model, moved(prompt()), seed=s, do_sample=True).to_torch() for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mesh", ["inline", "local"], indirect=True)
def test_assisted_decoding(do_sample: bool, mesh: Any) -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    assistant, _ = toy("AutoModelForCausalLM", "qwen3")
    inputs = {name: value[1:] for name, value in prompt().items()}
    want = generate(model, inputs, do_sample=do_sample, assistant_model=assistant)
    same(generate(on_mesh(model), moved(inputs), do_sample=do_sample, assistant_model=on_mesh(assistant)), want)


def test_embeddings_as_the_prompt() -> None:
    model, _ = toy("AutoModelForCausalLM", "llama")
    there, inputs = on_mesh(model), prompt(padding=3)
    ids = inputs.pop("input_ids")
    inputs["inputs_embeds"] = model.get_input_embeddings()(ids)
    given = moved(inputs)
    same(there.get_input_embeddings()(on_mesh(ids)), inputs["inputs_embeds"])
    same(generate(there, given, do_sample=False), generate(model, inputs, do_sample=False))


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


def word_tokenizer() -> Any:
    """A tokenizer whose tokens are the words w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(320)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3")


def test_stopping_by_a_criterion_of_the_users() -> None:
    model, inputs = toy("AutoModelForCausalLM", "llama")[0], prompt()
    wanted = [int(generate(model, inputs, do_sample=False)[row, 11 + row]) for row in (0, 1)]

    def seen(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return (ids[:, 9:] == torch.tensor(wanted, device=ids.device)[:, None]).any(1)

    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "stopping_criteria": [seen]}
    want = model.generate(**inputs, **options)
    assert want.shape[1] < 9 + NEW_TOKENS
    same(on_mesh(model).generate(**moved(inputs), **options), want)


@pytest.mark.parametrize("mesh", ["inline", "local"], indirect=True)
def test_streaming_from_another_thread(mesh: Any) -> None:
    from transformers import TextIteratorStreamer

    model, inputs = toy("AutoModelForCausalLM", "llama")[0], {name: value[1:] for name, value in prompt().items()}

    def streamed(m: Any, given: Any) -> list[str]:
        streamer = TextIteratorStreamer(word_tokenizer(), skip_prompt=True, timeout=60)
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(contextvars.copy_context().run, generate, m, given, do_sample=False, streamer=streamer)
            pieces = list(streamer)
            done.result()
        return pieces

    want = streamed(model, inputs)
    assert len("".join(want).split()) == NEW_TOKENS
    assert streamed(on_mesh(model), moved(inputs)) == want


def test_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TextStreamer

    tokenizer = word_tokenizer()
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
