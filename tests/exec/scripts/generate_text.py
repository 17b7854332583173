"""Generates text with a small causal language model: greedy, sampled, with beams, and streamed word by word."""

import argparse

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast, TextStreamer, pipeline


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", padding_side="left"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", action="append")
    parser.add_argument("--max_new_tokens", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = args.prompt or ["Hello, world", "The cat"]

    torch.manual_seed(args.seed)
    tokenizer = byte_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval().to("cuda")
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to("cuda")

    ways = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9},
        "beams": {"do_sample": False, "num_beams": 3},
        "static cache": {"do_sample": False, "cache_implementation": "static"},
    }
    for name, options in ways.items():
        torch.manual_seed(args.seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(args.seed)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **options)
        print(name, output[:, inputs["input_ids"].shape[1] :].tolist())

    print("streamed: ", end="")
    one = tokenizer(prompts[:1], return_tensors="pt").to("cuda")
    model.generate(**one, max_new_tokens=args.max_new_tokens, do_sample=False, streamer=TextStreamer(tokenizer))

    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cuda")
    print("pipeline:", generator(prompts[0], max_new_tokens=args.max_new_tokens, do_sample=False)[0]["generated_text"])


if __name__ == "__main__":
    main()
