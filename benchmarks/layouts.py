#!/usr/bin/env python3
"""Predicted and measured times of the layouts of a Llama, and whether both have one order.

    python benchmarks/layouts.py [--devices 2] [--batch 8] [--sequence 256] [--repeats 5] [--json FILE]

Speeds are measured first, as `dtorch bench-links` does. Give it no more devices than there are idle processor cores:
the cost model takes devices to work side by side. Also measured: pipelines with 1, 2, 4 and 8 micro-batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import dtorch
from dtorch.parallel.links import measure
from dtorch.parallel.suggest import suggest


def model() -> Any:
    """Eight layers of 512 features."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, vocab_size=1024
    )
    return transformers.LlamaForCausalLM(config).eval()


def seconds(plain: Any, layout: dict[str, int], microbatches: int, ids: torch.Tensor, repeats: int) -> float:
    """Median time of a call, after one that makes its plans."""
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    placed = dtorch.parallelize(copy.deepcopy(plain), mesh, microbatches=microbatches)
    times = []
    with torch.no_grad():
        for _ in range(repeats + 1):
            dtorch.synchronize()
            start = time.perf_counter()
            placed(ids, use_cache=False)
            dtorch.synchronize()
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Print a row for each layout, and Spearman's correlation of the two orders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("devices", 2), ("batch", 8), ("sequence", 256), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtorch.init(mode="local", workers=options.devices, threads=1)
    links, plain = measure(options.devices), model()
    ids = torch.randint(0, 1024, (options.batch, options.sequence))
    rows: list[dict[str, Any]] = []
    for found in suggest(plain, options.devices, options.batch, options.sequence, links=links):
        measured = seconds(plain, found.layout, found.microbatches, ids, options.repeats)
        name = ",".join(f"{axis}={n}" for axis, n in found.layout.items())
        rows.append({"layout": name, "predicted_s": found.forecast.seconds, "measured_s": measured})
        print(f"{name:20s} predicted {found.forecast.seconds * 1e3:8.1f} ms   measured {measured * 1e3:8.1f} ms   {found.reason}")
    by_time = sorted(range(len(rows)), key=lambda i: rows[i]["measured_s"])
    n = len(rows)
    order = 1 - 6 * sum((place - i) ** 2 for place, i in enumerate(by_time)) / max(n**3 - n, 1)
    print(f"Spearman's correlation of the orders: {order:.2f}")
    stages = {"pp": options.devices}
    pipelines = {parts: seconds(plain, stages, parts, ids, options.repeats) for parts in (1, 2, 4, 8)}
    for parts, measured in pipelines.items():
        print(f"pp={options.devices}, {parts} micro-batches: {measured * 1e3:8.1f} ms")
    if options.json:
        options.json.write_text(json.dumps({"layouts": rows, "spearman": order, "pipelines": pipelines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
