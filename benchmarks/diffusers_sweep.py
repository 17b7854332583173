#!/usr/bin/env python3
"""Unmodified diffusers pipelines on dtorch, compared with plain torch: on one device every bit must be the same.

    python benchmarks/diffusers_sweep.py --list
    python benchmarks/diffusers_sweep.py [--only REGEX] [--mode inline|local] [--devices N] [--seconds 120]

Pipelines are tiny, with random weights; nothing is downloaded. A line for each case, the totals last. ``reads``: values
that the client waited for in each denoising step after the first. The exit code is 1 when a case fails.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
import traceback
import warnings
from typing import Any

import torch


class TooSlowError(Exception):
    """A case took longer than allowed."""


def compare(got: Any, want: Any) -> str:
    """What is wrong with results; empty when they are equal to the bit."""
    if len(got) != len(want):
        return f"{len(got)} results instead of {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}"
        if not torch.equal(torch.nan_to_num(a, 0.25), torch.nan_to_num(b, 0.25)):
            return f"result {i}: largest difference {(a.double() - b.double()).abs().max():.2e}"
        if b.isnan().any() or b.unique().numel() < 4:
            return f"result {i} is no picture: nan, or the same everywhere"
    return ""


def run(name: str, trace: bool) -> tuple[str, list[int]]:
    """One case on plain torch and on the mesh: what is wrong, and the reads of each step."""
    from diffusers_cases import CASES, Place

    from dtorch.client import graph

    want = CASES[name](Place("cpu"))
    place = Place("dtorch", count=lambda: graph.current_session().reads)
    try:
        got = CASES[name](place)
    except TooSlowError:
        raise
    except Exception as e:
        if trace:
            traceback.print_exc()
        return f"{type(e).__name__}: {str(e)[:300]!r}", place.reads
    return compare(got, want), place.reads


def main() -> int:
    """Run the cases; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="print the cases and what they show")
    p.add_argument("--only", default=".", help="regular expression that the names of cases must contain")
    p.add_argument("--mode", choices=["inline", "local"], default="local")
    p.add_argument("--devices", type=int, default=1, help="size of the mesh; everything is whole on each device")
    p.add_argument("--threads", type=int, default=1, help="computing threads, the same in client and worker")
    p.add_argument("--seconds", type=int, default=120, help="limit for one case")
    p.add_argument("--trace", action="store_true", help="print the traceback of an error")
    args = p.parse_args()
    warnings.filterwarnings("ignore")
    import diffusers.utils.logging
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    from diffusers_cases import CASES

    names = [name for name in CASES if re.search(args.only, name)]
    if args.list:
        for name in names:
            print(f"{name:32s} {(CASES[name].__doc__ or '').strip().splitlines()[0]}")
        return 0
    import dtorch

    torch.set_num_threads(args.threads)
    dtorch.init(mode=args.mode, workers=args.devices, threads=args.threads)
    signal.signal(signal.SIGALRM, _too_slow)
    good = 0
    with dtorch.init_device_mesh("cpu", (args.devices,)):
        for name in names:
            start = time.time()
            signal.alarm(args.seconds)
            try:
                why, reads = run(name, args.trace)
            except TooSlowError:
                why, reads = f"not done after {args.seconds} s", []
            finally:
                signal.alarm(0)
            good += not why
            counts = f"reads {reads}" if reads else ""
            print(f"{'FAIL' if why else 'ok  '}  {name:32s} {time.time() - start:5.1f} s  {why or counts}", flush=True)
    dtorch.shutdown()
    print(f"cases {good}/{len(names)} ok")
    return 0 if good == len(names) else 1


def _too_slow(signum: int, frame: Any) -> None:
    raise TooSlowError


if __name__ == "__main__":
    sys.exit(main())
