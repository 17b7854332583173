#!/usr/bin/env python3
"""An LLM's decoding loop with a cache that grows: time and planning for each token, beside torch eager.

    python benchmarks/decode.py [--tokens 256] [--rounds 3] [--hidden 512] [--layers 4] [--tp 1] [--mode local] [--json FILE]

A Llama with random weights takes a prompt of 8 tokens and continues it greedily, token by token, with transformers'
``DynamicCache``. torch eager and dtorch take turns, token by token, so that a drift of the machine's speed hits both; a
token ends when its number is here. Both use as many computing threads: one for each device. The first rounds of tokens are
where a program plans; the table has medians over the rounds of the medians of every 32 tokens, and the calls planned in them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import dtorch

PROMPT, BLOCK = 8, 32


class Decoder:
    """One model in the middle of its loop."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        from transformers import DynamicCache

        self.model, self.ids, self.cache = model, ids, DynamicCache(config=model.config)
        self.tokens: list[int] = []

    def step(self) -> float:
        """The next token; seconds until it is here."""
        start = time.perf_counter()
        logits = self.model(input_ids=self.ids, past_key_values=self.cache, use_cache=True).logits
        self.ids = logits[:, -1:].argmax(-1)
        self.tokens.append(int(self.ids))
        return time.perf_counter() - start


def llama(hidden: int, layers: int, length: int) -> Any:
    """A Llama with heads of 64 features."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 2), vocab_size=4096, max_position_embeddings=length,
    )).eval()  # fmt: skip


def main() -> int:
    """Print and write the figures; returns the exit code: 1 when the tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 256), ("rounds", 3), ("hidden", 512), ("layers", 4), ("tp", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mode", choices=["local", "inline"], default="local")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.mode == "local":
        dtorch.init(mode="local", workers=options.tp, threads=1)
    else:
        dtorch.init(mode="inline")
    mesh = dtorch.init_device_mesh("cpu", (options.tp,), mesh_dim_names=("tp",))
    plain = llama(options.hidden, options.layers, PROMPT + options.tokens)
    ids = torch.randint(0, 4096, (1, PROMPT))
    rounds: dict[str, list[list[float]]] = {"torch": [], "dtorch": []}
    planned: list[list[int]] = []
    same = True
    with torch.no_grad(), mesh:
        placed = dtorch.parallelize(copy.deepcopy(plain), mesh)
        for _ in range(options.rounds):
            decoders = {"torch": Decoder(plain, ids), "dtorch": Decoder(placed, ids.to("dtorch"))}
            times: dict[str, list[float]] = {kind: [] for kind in decoders}
            counts = [dtorch.plan_stats()["planned"]]
            for _ in range(options.tokens):
                for kind, decoder in decoders.items():
                    times[kind].append(1e3 * decoder.step())
                counts.append(dtorch.plan_stats()["planned"])
            for kind, row in times.items():
                rounds[kind].append(row)
            planned.append([b - a for a, b in pairwise(counts)])
            same = same and decoders["torch"].tokens == decoders["dtorch"].tokens
    blocks = [range(at, min(at + BLOCK, options.tokens)) for at in range(0, options.tokens, BLOCK)]
    table = []
    for block in blocks:
        row: dict[str, Any] = {"tokens": f"{block[0] + 1}-{block[-1] + 1}", "planned": [sum(p[t] for t in block) for p in planned]}
        for kind, found in rounds.items():
            row[kind] = statistics.median(statistics.median(times[t] for t in block) for times in found)
        row["ratio"] = statistics.median(
            statistics.median(b[t] / a[t] for t in block) for a, b in zip(rounds["torch"], rounds["dtorch"], strict=True)
        )
        table.append(row)
    print(f"{'tokens':>10s} {'torch ms':>9s} {'dtorch ms':>10s} {'ratio':>6s}  calls planned in each round")
    for row in table:
        print(f"{row['tokens']:>10s} {row['torch']:9.2f} {row['dtorch']:10.2f} {row['ratio']:6.2f}  {row['planned']}")
    after = [sum(p[4:]) for p in planned]
    print(f"calls planned after the fourth token: {after}; tokens {'agree' if same else 'DIFFER'}")
    if options.json:
        settings = {k: v for k, v in vars(options).items() if k != "json"}
        options.json.write_text(json.dumps(
            {"settings": settings, "table": table, "milliseconds": rounds, "planned": planned, "same": same}, indent=1
        ))  # fmt: skip
    dtorch.shutdown()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
