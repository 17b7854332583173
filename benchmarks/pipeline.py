#!/usr/bin/env python3
"""Whether the stages of a pipeline work at once: wall-clock times of micro-batches and schedules.

    python benchmarks/pipeline.py [--hidden 512] [--layers 8] [--batch 16] [--sequence 128] [--repeats 5] [--json FILE]

Two stages on two workers of one thread, against the same batch on one of them. With m micro-batches the textbook has
(m + 1) / 2m of that time (m v + 1 with v stages a device). Shortest of the repeats, which take turns so that a busy
machine treats all alike; give it two idle processor cores.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import dtorch
from dtorch.parallel import GPipe, Interleaved, OneForwardOneBackward

STAGES = 2
PARTS = (1, 2, 4, 8)


def model(hidden: int, layers: int) -> Any:
    """A Llama whose embedding and head are small beside its layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers, num_attention_heads=8,
        vocab_size=256,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def forward(plain: Any, ids: torch.Tensor, stages: int, parts: int) -> Callable[[], object]:
    """A call in so many micro-batches."""
    placed = dtorch.parallelize(copy.deepcopy(plain), mesh(stages), microbatches=parts)

    def call() -> object:
        with torch.no_grad():
            return placed(ids, use_cache=False)

    return call


def training(plain: Any, ids: torch.Tensor, stages: int, parts: int, kind: Any, chunks: int) -> Callable[[], object]:
    """A training step without its optimizer."""
    placed = dtorch.parallelize(copy.deepcopy(plain), mesh(stages), chunks=chunks)
    rows = ids.chunk(parts)
    schedule = kind(stages, parts, chunks)
    return lambda: schedule.run(lambda i: placed(rows[i], labels=rows[i], use_cache=False).loss / parts)


def mesh(stages: int) -> dtorch.DeviceMesh:
    """The first so many devices."""
    return dtorch.init_device_mesh("cpu", (stages,), mesh_dim_names=("pp",))


def measure(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Shortest time of each, after a round that makes the plans."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 2):
        for name, call in work.items():
            dtorch.synchronize()
            start = time.perf_counter()
            result = call()
            dtorch.synchronize()
            del result
            times[name] += [time.perf_counter() - start] * (turn > 1)
    return {name: min(found) for name, found in times.items()}


def main() -> None:
    """Print a row for each kind and number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 8), ("batch", 16), ("sequence", 128), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtorch.init(mode="local", workers=STAGES, threads=1)
    plain, ids = model(options.hidden, options.layers), torch.randint(0, 256, (options.batch, options.sequence))
    work = {"forward, one device": forward(plain, ids, 1, 1), "training, one device": training(plain, ids, 1, 1, GPipe, 1)}
    ideal = {}
    for m in PARTS:
        kinds: list[tuple[str, Any, int]] = [("GPipe", GPipe, 1), ("1F1B", OneForwardOneBackward, 1)]
        kinds += [("interleaved", Interleaved, 2)] * (m % STAGES == 0)
        work[f"forward, {m} micro-batches"] = forward(plain, ids, STAGES, m)
        ideal[f"forward, {m} micro-batches"] = (m + 1) / (2 * m)
        for label, kind, chunks in kinds:
            name = f"training, {m} micro-batches, {label}"
            work[name], ideal[name] = training(plain, ids, STAGES, m, kind, chunks), (m * chunks + 1) / (2 * m * chunks)
    times = measure(work, options.repeats)
    rows = []
    for name, seconds in times.items():
        share = seconds / times[f"{name.partition(',')[0]}, one device"]
        rows.append({"what": name, "seconds": seconds, "share": share, "ideal": ideal.get(name, 1.0)})
        print(f"{name:40s} {seconds * 1e3:9.1f} ms   {share:5.2f} of one device's, textbook {ideal.get(name, 1.0):.2f}")
    if options.json:
        options.json.write_text(json.dumps({"options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
