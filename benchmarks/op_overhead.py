#!/usr/bin/env python3
"""Client cost of one cached operator, side by side: torch eager, torch's DTensor, dtorch.

    python benchmarks/op_overhead.py [--repeats 15] [--calls 400] [--json FILE]

Every implementation gets its own process for each of the repeats' rounds and they take turns, so that a drift of the
machine's speed hits all alike; the figures are medians of the rounds. Shapes are tiny: what is measured is everything
but the arithmetic. dtorch runs against null workers here (they answer and compute nothing), since workers have
processors of their own; the end-to-end rows run on real workers.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

OPS = ("add", "linear", "view", "layer_norm", "sdpa")


def operators(make: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
    """The measured calls on tensors made by ``make`` from plain ones."""
    import torch
    import torch.nn.functional as F

    x, w, b = (make(t) for t in (torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)))
    q, k, v = (make(torch.randn(2, 2, 4, 8)) for _ in range(3))
    return {
        "add": lambda: x + x,
        "linear": lambda: F.linear(x, w, b),
        "view": lambda: x.view(2, 16),
        "layer_norm": lambda: F.layer_norm(x, (8,), b, b),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v),
    }


def per_call_us(call: Callable[[], Any], calls: int, settle: Callable[[], None]) -> float:
    """Microseconds a call, after a warm-up; what is queued and old garbage are settled outside of the timing."""
    for _ in range(300):
        call()
    settle()
    gc.collect()
    gc.freeze()  # what the imports made: a full collection of it inside the timing would be a coin tossed
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - start
    settle()
    return 1e6 * took / calls


def child(kind: str, calls: int) -> dict[str, float]:
    """One round of one implementation, in this process."""
    import torch

    torch.set_num_threads(1)
    if kind.startswith("dtorch"):
        import dtorch

        workers = int(kind.partition("-")[2] or 2)
        dtorch.init(mode="local", null_workers=workers)
        mesh = dtorch.DeviceMesh("cpu", list(range(workers)))

        def make(t: Any) -> Any:
            return dtorch.Tensor(t, device_mesh=mesh, placements=[dtorch.Replicate()])

        def settle() -> None:
            time.sleep(0.02)

    elif kind == "dtensor":
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        mesh = init_device_mesh("cpu", (2,))

        def make(t: Any) -> Any:
            return distribute_tensor(t, mesh, [Replicate()])

        def settle() -> None:
            return None

    else:

        def make(t: Any) -> Any:
            return t

        def settle() -> None:
            return None

    with torch.no_grad():
        return {name: per_call_us(call, calls, settle) for name, call in operators(make).items()}


def end_to_end(kind: str, calls: int) -> dict[str, float]:
    """Adds a second through real workers, until the last value is here."""
    import torch

    torch.set_num_threads(1)
    x = torch.zeros(4)
    if kind == "e2e-dtorch":
        import dtorch

        mesh = dtorch.DeviceMesh("cpu", [0])
        x = dtorch.Tensor(x, device_mesh=mesh, placements=[dtorch.Replicate()])
    with torch.no_grad():
        best = 0.0
        for _ in range(3):
            y = x
            start = time.perf_counter()
            for _ in range(calls):
                y = y + 1
            y.tolist()
            best = max(best, calls / (time.perf_counter() - start))
    return {"adds a second": best}


def run(kind: str, calls: int) -> dict[str, float]:
    """A round in a fresh process."""
    out = subprocess.run(
        [sys.executable, __file__, "--child", kind, "--calls", str(calls)], check=False, capture_output=True, text=True, timeout=120
    )
    if out.returncode:
        raise RuntimeError(f"{kind}: {out.stderr[-2000:]}")
    result: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", default=None)
    parser.add_argument("--child", default=None)
    args = parser.parse_args()
    if args.child:
        measure = end_to_end if args.child.startswith("e2e") else child
        print(json.dumps(measure(args.child, args.calls)))
        return 0
    kinds = ("eager", "dtensor", "dtorch-2", "dtorch-16", "dtorch-128")
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for kind in kinds:
            rounds[kind].append(run(kind, args.calls))
    table = {kind: {op: statistics.median(r[op] for r in rows) for op in OPS} for kind, rows in rounds.items()}
    print(
        f"{'us a call, median of ' + str(args.repeats):28s}"
        + "".join(f"{op:>12s}" for op in OPS)
        + f"{'geo. mean':>12s}"
    )
    for kind, row in table.items():
        mean = math.exp(statistics.mean(math.log(row[op]) for op in OPS))
        print(f"{kind:28s}" + "".join(f"{row[op]:12.2f}" for op in OPS) + f"{mean:12.2f}")
    ratios = [
        math.exp(statistics.mean(math.log(a[op] / b[op]) for op in OPS))
        for a, b in zip(rounds["dtorch-2"], rounds["dtensor"], strict=True)
    ]
    print(f"dtorch / DTensor, geometric mean, pair by pair: {', '.join(f'{r:.2f}' for r in sorted(ratios))}")
    flat = [
        math.exp(statistics.mean(math.log(a[op] / b[op]) for op in OPS))
        for a, b in zip(rounds["dtorch-128"], rounds["dtorch-2"], strict=True)
    ]
    print(f"128 workers / 2 workers, pair by pair: {', '.join(f'{r:.2f}' for r in sorted(flat))}")
    totals = {kind: run(kind, 10_000) for kind in ("e2e-eager", "e2e-dtorch")}
    for kind, row in totals.items():
        print(f"{kind}: {row['adds a second']:,.0f} adds a second, the last value read back")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"table": table, "ratios": ratios, "flat": flat, "end_to_end": totals}, f, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
