#!/usr/bin/env python3
"""Bandwidth between the program and a local worker, beside that of copying memory within one process.

    python benchmarks/transfer.py [--bytes 1073741824] [--repeats 3] [--json FILE]

``copy`` writes to memory that is there, ``clone`` to fresh memory, as the receiver of a transfer must. A transfer is
over when the worker has confirmed it. ``load`` is the upload of a tensor whose memory is a mapped file's: the worker
maps the file as well, and no byte is copied before it is used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Median of the timed calls; what a call returns is dropped outside of the timing."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        kept = call()
        times.append(time.perf_counter() - start)
        del kept
    return statistics.median(times)


def measure(nbytes: int, repeats: int) -> dict[str, float]:
    """Bytes a second of each way."""
    import torch
    from safetensors.torch import load_file, save_file

    import dtorch

    mesh = dtorch.DeviceMesh("cpu", [0])
    source = torch.arange(nbytes // 8).view(torch.float32)
    target = torch.empty_like(source).zero_()
    there = dtorch.Tensor(source, device_mesh=mesh)
    dtorch.synchronize()

    def upload(t: torch.Tensor) -> Any:
        out = dtorch.Tensor(t, device_mesh=mesh)
        dtorch.synchronize()
        return out

    with tempfile.TemporaryDirectory() as folder:
        save_file({"x": source}, Path(folder) / "x.safetensors")
        mapped = load_file(Path(folder) / "x.safetensors")["x"]
        ways: dict[str, Callable[[], Any]] = {
            "copy": lambda: target.copy_(source),
            "clone": source.clone,
            "upload": lambda: upload(source),
            "download": there.to_torch,
            "load": lambda: upload(mapped),
        }
        found = {name: nbytes / seconds(way, repeats) for name, way in ways.items()}
    assert torch.equal(there.to_torch(), source)
    return found


def main() -> None:
    """Print a table, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[1 << 20, 1 << 24, 1 << 30])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {nbytes: measure(nbytes, options.repeats) for nbytes in options.bytes}
    names = list(next(iter(found.values())))
    print(f"{'GB/s':>12s}" + "".join(f"{name:>10s}" for name in names))
    for nbytes, rates in found.items():
        print(f"{nbytes / 2**20:9.0f} MB" + "".join(f"{rates[name] / 1e9:10.2f}" for name in names))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
