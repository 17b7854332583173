#!/usr/bin/env python3
"""``from_pretrained`` of a random safetensors model: the program's time and peak memory, plain and with dtorch.

    python benchmarks/loading.py [--gigabytes 2] [--repeats 3] [--json FILE]

Every way gets its own process for each repeat and they take turns. Imports, the start of the session and the loading of
a tiny model come first and do not count. Plain loading maps the file and reads nothing, so two times are given: until
the call returns, and until every weight has been read (plain: by touching it) or has reached its device (dtorch). The
peak is that of the program's resident memory above where it stood before; file pages that it touches count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = {
    "plain": "from_pretrained(dir)",
    "device_map": 'from_pretrained(dir, device_map="dtorch:0")',
    "to": 'from_pretrained(dir).to("dtorch")',
    "tp": "parallelize(from_pretrained(dir), tp=2)",
    "bf16 plain": "from_pretrained(dir, dtype=bfloat16)",
    "bf16 device_map": 'from_pretrained(dir, dtype=bfloat16, device_map="dtorch:0")',
}


def make(folder: Path, gigabytes: float) -> None:
    """A Llama of about this size in float32, and a tiny one, with random weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, words = 2048, 5632, 32000
    layers = max(1, round((gigabytes * 2**28 - 2 * words * hidden) / (4 * hidden**2 + 3 * hidden * inner)))
    for name, sizes in (("big", (hidden, inner, words, layers)), ("tiny", (64, 64, 64, 1))):
        config = LlamaConfig(
            hidden_size=sizes[0], intermediate_size=sizes[1], vocab_size=sizes[2], num_hidden_layers=sizes[3],
            num_attention_heads=sizes[0] // 64, architectures=["LlamaForCausalLM"],
        )  # fmt: skip
        config.save_pretrained(folder / name)
        with torch.device("meta"):
            shapes = {k: v.shape for k, v in LlamaForCausalLM(config).state_dict().items()}
        weights = {k: torch.rand(shape) * 0.04 - 0.02 for k, shape in shapes.items()}
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})


def peak_bytes(pid: int | str = "self") -> int:
    """Peak resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not tell the peak memory of process {pid}")


def child(way: str, folder: Path) -> dict[str, float]:
    """One repeat of one way, in this process."""
    import torch
    from transformers import LlamaForCausalLM

    options: dict[str, Any] = {"dtype": torch.bfloat16} if way.startswith("bf16") else {}
    way = way.removeprefix("bf16 ")

    def load(name: str) -> Any:
        if way == "device_map":
            return LlamaForCausalLM.from_pretrained(folder / name, device_map="dtorch:0", **options)
        model = LlamaForCausalLM.from_pretrained(folder / name, **options)
        if way == "to":
            return model.to("dtorch")
        return dtorch.parallelize(model, mesh) if way == "tp" else model

    def settle(model: Any) -> None:
        if way == "plain":
            for p in model.parameters():
                p.view(torch.int16).flatten()[:: 4096 // 2].sum()  # a number of every page
        else:
            dtorch.synchronize()

    if way != "plain":
        import dtorch

        mesh = dtorch.init_device_mesh("cpu", (2 if way == "tp" else 1,), mesh_dim_names=("tp",))
        torch.zeros(1, device="dtorch")
    settle(load("tiny"))
    before = peak_bytes()
    start = time.perf_counter()
    model = load("big")
    returned = time.perf_counter() - start
    settle(model)
    ready = time.perf_counter() - start
    workers = 0 if way == "plain" else sum(peak_bytes(w.pid) for w in dtorch.workers())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return {
        "returned_s": returned, "ready_s": ready, "peak_bytes": peak_bytes() - before, "largest_bytes": largest,
        "workers_bytes": workers,
    }  # fmt: skip


def main() -> None:
    """Print a table, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child[0], Path(options.child[1]))))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), options.gigabytes)
        for _ in range(options.repeats):
            for way in WAYS:
                command = [sys.executable, __file__, "--child", way, folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {way: {k: statistics.median(r[k] for r in rounds) for k in rounds[0]} for way, rounds in found.items()}
    print(f"{'returns':>9s}{'ready':>9s}{'peak':>10s}{'workers':>10s}")
    for way, m in medians.items():
        sizes = f"{m['peak_bytes'] / 1e6:7.0f} MB{m['workers_bytes'] / 1e6:7.0f} MB"
        print(f"{m['returned_s']:7.2f} s{m['ready_s']:7.2f} s{sizes}   {WAYS[way]}")
    print(f"largest tensor: {medians['plain']['largest_bytes'] / 1e6:.0f} MB")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
