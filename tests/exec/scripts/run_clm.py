"""Trains a causal language model from scratch, in the manner of transformers' run_clm examples without a Trainer."""

import argparse
import math
from itertools import chain

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, default_data_collator, get_scheduler

TEXTS = [
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness.",
    "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little.",
    "All happy families are alike; every unhappy family is unhappy in its own way.",
    "In my younger and more vulnerable years my father gave me some advice that I have been turning over since.",
] * 8


def parse_args():
    parser = argparse.ArgumentParser(description="Train a transformers model on a causal language modeling task")
    parser.add_argument("--model_type", default="llama")
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--max_train_steps", type=int, default=6)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", default=None)
    return parser.parse_args()


def byte_tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def group_texts(token_lists, block_size):
    concatenated = list(chain(*token_lists))
    total = len(concatenated) // block_size * block_size
    blocks = [concatenated[i : i + block_size] for i in range(0, total, block_size)]
    return [{"input_ids": block, "attention_mask": [1] * block_size, "labels": list(block)} for block in blocks]


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda")

    tokenizer = byte_tokenizer()
    config = AutoConfig.for_model(
        args.model_type,
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AutoModelForCausalLM.from_config(config)
    print(f"Training new model from scratch: {sum(p.numel() for p in model.parameters()):,} parameters")
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.to(device)

    blocks = group_texts([tokenizer(text + tokenizer.eos_token)["input_ids"] for text in TEXTS], args.block_size)
    train_dataset, eval_dataset = blocks[:-8], blocks[-8:]
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=True,
        collate_fn=default_data_collator,
        batch_size=args.per_device_train_batch_size,
        pin_memory=True,
        drop_last=True,
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=4)

    no_decay = ["bias", "norm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=args.max_train_steps)

    model.train()
    completed, running, batches = 0, torch.zeros((), device=device), iter(train_dataloader)
    while completed < args.max_train_steps:
        for _ in range(args.gradient_accumulation_steps):
            batch = next(batches, None)
            if batch is None:
                batches = iter(train_dataloader)
                batch = next(batches)
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.bf16):
                loss = model(**batch).loss / args.gradient_accumulation_steps
            running += loss.detach()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        completed += 1
        print(f"step {completed} loss {running.item():.8f} norm {norm.item():.8f} lr {lr_scheduler.get_last_lr()[0]:g}")
        running.zero_()

    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**{k: v.to(device) for k, v in batch.items()})
        losses.append(outputs.loss.repeat(len(batch["input_ids"])))
    eval_loss = torch.mean(torch.cat(losses))
    print(f"eval loss {eval_loss.item():.8f} perplexity {math.exp(eval_loss):.6f}")
    if args.output_dir is not None:
        model.save_pretrained(args.output_dir)
        tokenizer.save_pretrained(args.output_dir)
        again = AutoModelForCausalLM.from_pretrained(args.output_dir)
        print(f"saved {sum(p.double().abs().sum().item() for p in again.parameters()):.10f}")


if __name__ == "__main__":
    main()
