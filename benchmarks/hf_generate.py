#!/usr/bin/env python3
"""Every way to generate, for every language model of transformers, on dtorch compared with plain torch.

    python benchmarks/hf_generate.py [--only REGEX] [--ways REGEX] [--mode inline|local] [--mesh 1] [--seconds 60]

Each causal language model that transformers has is built as in ``hf_sweep.py``, with random weights at toy size, and
continues two prompts, one of them padded on the left, in every way of ``WAYS`` that runs on plain torch. The tokens must
be the same. A line for each model: the ways that agree, those that differ, those that plain torch refuses; the totals
last. The exit code is 1 when one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import re
import signal
import sys
import time
import warnings
from typing import Any

import torch
from hf_sweep import TooSlowError, differs, host, raise_too_slow
from hf_toys import SEED, NotRunnableError, build
from torch import Tensor

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled-beams": {"do_sample": True, "num_beams": 2},
    "static-cache": {"do_sample": False, "cache_implementation": "static"},
    "no-cache": {"do_sample": False, "use_cache": False},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
}
NEW_TOKENS = 6


def prompts(padding: int) -> dict[str, Tensor]:
    """Two rows of token numbers with their attention mask, the first padded on the left."""
    ids = torch.randint(10, 300, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, way: str, device: str) -> Tensor:
    """The tokens, prompt included."""
    given = prompts(4)
    if way == "lookup":  # takes one prompt only, in which something is repeated
        given = {name: value[1:].repeat(1, 2) for name, value in given.items()}
    given = {name: value.to(device) for name, value in given.items()}
    torch.manual_seed(SEED)
    tokens: Tensor = model.generate(**given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **WAYS[way])
    return tokens


def compare(model: Any, ways: list[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """The ways that agree; those that differ, with what is wrong; and those that plain torch refuses."""
    want, refused = {}, []
    with contextlib.suppress(Exception):
        model(**prompts(4))  # some rebuild parts of themselves at the first call, with draws of the host's generator
    for way in ways:
        try:
            want[way] = generate(copy.deepcopy(model), way, "cpu")
        except TooSlowError:
            raise
        except Exception:  # toy sizes and some caches do not suit every model
            refused.append(way)
    there = model.to("dtorch")
    agree, wrong = [], {}
    for way, tokens in want.items():
        try:
            text = differs([host(generate(there, way, "dtorch"))], [tokens])
        except TooSlowError:
            raise
        except Exception as e:
            text = f"{type(e).__name__}: {str(e)[:300]!r}"
        if text:
            wrong[way] = text
        else:
            agree.append(way)
    return agree, wrong, refused


def main() -> int:
    """Run the sweep; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=".", help="regular expression that the model type must contain")
    p.add_argument("--ways", default=".", help="the same for the ways to generate")
    p.add_argument("--mode", choices=["inline", "local"], default="local")
    p.add_argument("--mesh", type=int, default=1, help="number of devices, each with the whole model")
    p.add_argument("--threads", type=int, default=1, help="computing threads, the same in client and workers")
    p.add_argument("--seconds", type=int, default=120, help="limit for one architecture")
    args = p.parse_args()
    warnings.filterwarnings("ignore")
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils import logging

    import dtorch

    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    dtorch.init(mode=args.mode, threads=args.threads)
    dtorch.init_device_mesh("cpu", (args.mesh,)).__enter__()
    signal.signal(signal.SIGALRM, raise_too_slow)
    ways = [way for way in WAYS if re.search(args.ways, way)]
    models = good = bad = 0
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if not re.search(args.only, model_type):
            continue
        start = time.time()
        signal.alarm(args.seconds)
        try:
            with torch.no_grad():
                agree, wrong, refused = compare(build(AutoModelForCausalLM, model_type)[0], ways)
        except (NotRunnableError, TooSlowError) as e:
            print(f"skip  {model_type:28s} {type(e).__name__}", flush=True)
            continue
        finally:
            signal.alarm(0)
        models, good, bad = models + bool(agree or wrong), good + len(agree), bad + len(wrong)
        refusals = f"  (plain torch refuses {', '.join(refused)})" if refused else ""
        print(
            f"{'FAIL' if wrong else 'ok  '}  {model_type:28s} {time.time() - start:5.1f} s  {' '.join(agree)}{refusals}"
        )
        for way, text in wrong.items():
            print(f"      {way}: {text}")
        sys.stdout.flush()
    print(f"{good}/{good + bad} ok ({models} architectures)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
