#!/usr/bin/env python3
"""Forward passes side by side: torch eager, dtorch, dtorch captured; all on one device with one computing thread.

    python benchmarks/capture.py [--repeats 60] [--compile] [--json FILE]

The implementations take turns in one process, call by call, so that a drift of the machine's speed hits all alike. End to
end is from the call until the result's values are here. Client is the time the call itself keeps the program, while the
workers have nothing else to do; its processor time is measured as well, since on a machine with other work the clock
counts that. With ``--compile`` also torch.compile in this process, and dtorch captured with ``compile=True``. Figures are medians, with the 10th and 90th percentile; ratios to torch are medians of ratios within a round.
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

KINDS = ["torch", "dtorch", "captured"]
COMPILED = ["torch.compile", "compiled"]


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


def measure(name: str, repeats: int, compiling: bool) -> dict[str, Any]:
    """Times in milliseconds of every repeat, by kind of time and implementation."""
    torch.manual_seed(0)
    plain, inputs, call = MODELS[name]()
    ours = copy.deepcopy(plain).to("dtorch")
    there = {k: v.to("dtorch") for k, v in inputs.items()}
    captured, compiled = dtorch.capture(ours), dtorch.capture(ours, compile=True)
    runs: dict[str, Callable[[], Any]] = {
        "torch": lambda: call(plain, inputs),
        "dtorch": lambda: call(ours, there),
        "captured": lambda: call(captured, there),
    }
    if compiling:
        by_torch = torch.compile(plain, dynamic=False)
        runs |= {"torch.compile": lambda: call(by_torch, inputs), "compiled": lambda: call(compiled, there)}
    for _ in range(6):
        results = {kind: f() for kind, f in runs.items()}
    values = {kind: r.to_torch() if isinstance(r, dtorch.DTensor) else r for kind, r in results.items()}
    assert all(torch.equal(values["torch"], values[kind]) for kind in KINDS), f"{name}: values differ"
    assert captured.replays, captured.refusals
    if compiling:
        # The worker compiles beside its work; its last bits tell when it is done.
        end = time.monotonic() + 300
        while torch.equal(runs["compiled"]().to_torch(), values["torch"]):
            assert time.monotonic() < end, "not compiled after 300 s, or to the very same bits"
            time.sleep(1)
        for kind in COMPILED:
            torch.testing.assert_close(values[kind], values["torch"], rtol=1e-3, atol=1e-4)
    times: dict[str, dict[str, list[float]]] = {
        kind: {f: [] for f in runs} for kind in ("client", "client_cpu", "end_to_end")
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
    parser.add_argument("--compile", action="store_true", help="torch.compile, and capture(compile=True), as well")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtorch.init(mode="local", workers=1, threads=1)
    report: dict[str, Any] = {}
    kinds = KINDS + (COMPILED if args.compile else [])
    pairs = [("captured", "torch"), *([("compiled", "torch.compile")] if args.compile else [])]
    heads = [f"{a} / {b}" for a, b in pairs]
    print(f"{'ms: median (10 % to 90 %)':32s}" + "".join(f"{f:>26s}" for f in kinds) + "".join(f"{h:>26s}" for h in heads))
    for name in MODELS:
        for mode, entered in MODES.items():
            with entered():
                times = measure(name, args.repeats, args.compile)
            for kind, by_run in times.items():
                rows = {f: summary(values) for f, values in by_run.items()}
                ratios = [statistics.median(x / y for x, y in zip(by_run[a], by_run[b], strict=True)) for a, b in pairs]
                report[f"{name} {mode} {kind}"] = {**rows, **dict(zip(heads, ratios, strict=True))}
                cells = (f"{r['median']:.2f} ({r['p10']:.2f} to {r['p90']:.2f})" for r in rows.values())
                line = name + " " + mode + " " + kind
                print(f"{line:32s}" + "".join(f"{c:>26s}" for c in cells) + "".join(f"{r:26.3f}" for r in ratios))
    dtorch.shutdown()
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
