"""Fine-tunes a classifier of sentences with LoRA adapters (PEFT), saves the adapters, and uses them merged."""

# ruff: noqa: PLW2901  # the usual form moves a batch to the device under its own name

import argparse

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, LlamaConfig, get_linear_schedule_with_warmup


class Sentences(torch.utils.data.Dataset):
    """Sequences of token numbers whose label says whether more of them are even or odd."""

    def __init__(self, count, length, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, vocab_size, (count, length), generator=generator)
        self.labels = ((self.ids % 2).sum(dim=1) * 2 > length).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def build_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=2,
        pad_token_id=0,
    )
    return AutoModelForSequenceClassification.from_config(config)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    correct, total = 0, 0.0
    for batch in loader:
        batch = {k: v.to(device) for k, v in batch.items()}
        logits = model(**batch).logits
        correct += (logits.argmax(dim=-1) == batch["labels"]).sum().item()
        total += logits.double().abs().sum().item()
    return f"{correct} of {len(loader.dataset)} right, sum {total:.8f}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--output_dir", default=None)
    args = parser.parse_args()
    device = "cuda:0"

    model = get_peft_model(
        build_model(),
        LoraConfig(
            task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
        ),
    )
    model.print_trainable_parameters()
    model.cuda()

    order = torch.Generator().manual_seed(5)
    train = DataLoader(Sentences(96, 12, 64, seed=1), batch_size=16, shuffle=True, generator=order, pin_memory=True)
    test = DataLoader(Sentences(32, 12, 64, seed=2), batch_size=32)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=args.lr)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, args.epochs * len(train))
    scaler = torch.cuda.amp.GradScaler(enabled=False)

    for epoch in range(args.epochs):
        model.train()
        for step, batch in enumerate(train):
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.8f}")
        print(f"epoch {epoch}: {evaluate(model, test, device)}")

    if args.output_dir:
        model.save_pretrained(args.output_dir)
        again = PeftModel.from_pretrained(build_model(), args.output_dir).to(device)
        print(f"loaded: {evaluate(again, test, device)}")
    merged = model.merge_and_unload()
    print(f"merged: {evaluate(merged, test, device)}")


if __name__ == "__main__":
    main()
