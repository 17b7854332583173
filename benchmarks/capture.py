#!/usr/bin/env python3
"""Forward passes side by side: torch eager, dtorch, dtorch captured; all on one device with one computing thread.

    python benchmarks/capture.py [--repeats 60] [--json FILE]

The implementations take turns in one process, call by call, so that a drift of the machine's speed hits all alike. End to
end is from the call until the result's values are here. Client is the time the call itself keeps the program, while the
workers have nothing else to do; its processor time is measured as well, since on a machine with other work the clock
counts that. Figures are medians, with the 10th and 90th percentile; ratios to torch are medians of ratios within a round.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import dtorch

KINDS = ("torch", "dtorch", "captured")


def llama() -> tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any, dict[str, Any]], Any]]:
    """Toy Llama: 8 layers, hidden size 64, 2 x 12 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=128,
    )  # fmt: skip
    inputs = {"input_ids": torch.randint(0, 320, (2, 12))}
    return LlamaForCausalLM(config).eval(), inputs, lambda m, x: m(**x, use_cache=False).logits


def sd3() -> tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any, dict[str, Any]], Any]]:
    """Toy transformer of Stable Diffusion 3: 4 blocks of width 64, 64 patches, 16 words, batch 2."""
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, out_channels=4, num_layers=4, num_attention_heads=4,
        attention_head_dim=16, joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=64,
        pos_embed_max_size=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 16, 32),
        "pooled_projections": torch.randn(2, 64), "timestep": torch.tensor([500.0, 500.0]),
    }  # fmt: skip
    return model.eval(), inputs, lambda m, x: m(**x, return_dict=False)[0]


MODELS = {"llama": llama, "sd3": sd3}
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Times in milliseconds of every repeat, by kind of time and implementation."""
    torch.manual_seed(0)
    plain, inputs, call = MODELS[name]()
    ours = copy.deepcopy(plain).to("dtorch")
    there = {k: v.to("dtorch") for k, v in inputs.items()}
    captured = dtorch.capture(ours)
    runs: dict[str, Callable[[], Any]] = {
        "torch": lambda: call(plain, inputs),
        "dtorch": lambda: call(ours, there),
        "captured": lambda: call(captured, there),
    }
    for _ in range(6):
        results = [f() for f in runs.values()]
    want, *others = (r.to_torch() if isinstance(r, dtorch.DTensor) else r for r in results)
    assert all(torch.equal(want, other) for other in others), f"{name}: values differ"
    assert captured.replays, captured.refusals
    times: dict[str, dict[str, list[float]]] = {
        kind: {f: [] for f in KINDS} for kind in ("client", "client_cpu", "end_to_end")
    }
    for _ in range(repeats):
        for f, run in runs.items():
            start, cpu = time.perf_counter(), time.thread_time()
            result = run()
            times["client"][f].append(1e3 * (time.perf_counter() - start))
            times["client_cpu"][f].append(1e3 * (time.thread_time() - cpu))
            dtorch.synchronize()
            start = time.perf_counter()
            result = run()
            if isinstance(result, dtorch.DTensor):
                result.to_torch()
            times["end_to_end"][f].append(1e3 * (time.perf_counter() - start))
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Median and the spread around it."""
    cuts = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": cuts[0], "p90": cuts[-1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtorch.init(mode="local", workers=1, threads=1)
    report: dict[str, Any] = {}
    print(f"{'ms: median (10 % to 90 %)':32s}" + "".join(f"{f:>26s}" for f in KINDS) + f"{'captured / torch':>18s}")
    for name in MODELS:
        for mode, entered in MODES.items():
            with entered():
                times = measure(name, args.repeats)
            for kind, by_run in times.items():
                rows = {f: summary(values) for f, values in by_run.items()}
                ratio = statistics.median(
                    a / b for a, b in zip(by_run["captured"], by_run["torch"], strict=True)
                )
                report[f"{name} {mode} {kind}"] = {**rows, "ratio": ratio}
                cells = (f"{r['median']:.2f} ({r['p10']:.2f} to {r['p90']:.2f})" for r in rows.values())
                print(f"{name + ' ' + mode + ' ' + kind:32s}" + "".join(f"{c:>26s}" for c in cells) + f"{ratio:18.3f}")
    dtorch.shutdown()
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
