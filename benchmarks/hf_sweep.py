#!/usr/bin/env python3
"""Unmodified encoders, encoder-decoders, vision, audio and vision-language models on dtorch, compared with plain torch.

    python benchmarks/hf_sweep.py --list [--only REGEX]        # what runs on plain torch at toy size
    python benchmarks/hf_sweep.py [--only REGEX] [--mode inline|local] [--mesh 1] [--seconds 60]

Every architecture of transformers' auto classes that is no causal language model is built with random weights from
its own configuration class, shrunk to a toy, and run on plain torch; then the same module is moved to dtorch and run
again. Every tensor that forward returns, and the tokens of ``generate`` where a model has it, must be the same to the
bit. A line for each architecture, the totals last. The exit code is 1 when one fails.
"""

from __future__ import annotations

import argparse
import copy
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from hf_toys import SEED, NotRunnableError, build, tensors_of
from torch import Tensor

# Draws once from the host's generator and once from the device's; on the CPU these are one.
LEFT_OUT = frozenset({"vits"})


class TooSlowError(Exception):
    """An architecture took longer than allowed."""


def raise_too_slow(signum: int, frame: Any) -> None:
    """Handler of the alarm that ends an architecture."""
    raise TooSlowError


def architectures() -> Iterator[tuple[str, str, Any]]:
    """(task, model type, auto class); encoder-decoders of text and those with speech or images once more, to generate."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tasks = (
        ("base", "MODEL", "AutoModel"),
        ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
        ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq"),
        ("image-text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "AutoModelForImageTextToText"),
        ("mask", "MODEL_FOR_MASK_GENERATION", "AutoModelForMaskGeneration"),
        ("masked-lm", "MODEL_FOR_MASKED_LM", "AutoModelForMaskedLM"),
        ("image-class", "MODEL_FOR_IMAGE_CLASSIFICATION", "AutoModelForImageClassification"),
        ("detection", "MODEL_FOR_OBJECT_DETECTION", "AutoModelForObjectDetection"),
        ("ctc", "MODEL_FOR_CTC", "AutoModelForCTC"),
    )
    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for task, mapping, cls in tasks:
        for model_type in sorted(getattr(auto, f"{mapping}_MAPPING_NAMES")):
            if (task in ("seq2seq", "speech", "masked-lm") or model_type not in causal) and model_type not in LEFT_OUT:
                yield task, model_type, getattr(transformers, cls)


def generate(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Six greedy tokens after the inputs."""
    # Some models write into what they are given.
    prompt = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items() if not k.startswith("decoder_")}
    torch.manual_seed(SEED)
    tokens: Tensor = model.generate(**prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return tokens


def differs(got: list[Tensor], want: list[Tensor]) -> str:
    """What is wrong with results; empty when they are equal to the bit."""
    if len(got) != len(want):
        return f"{len(got)} tensors instead of {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"tensor {i}: {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}"
        if not torch.equal(torch.nan_to_num(a, 0.25), torch.nan_to_num(b, 0.25)):
            return f"tensor {i} {tuple(a.shape)}: largest difference {(a.double() - b.double()).abs().max():.2e}"
    return ""


def host(t: Any) -> Tensor:
    """The value of a tensor on any device."""
    return t.to_torch() if hasattr(t, "to_torch") else t


def compare(model: torch.nn.Module, inputs: dict[str, Any], want: list[Tensor]) -> tuple[bool, str]:
    """Whether it generated on dtorch too, and what is wrong on dtorch."""
    want_tokens = None
    if getattr(model, "can_generate", lambda: False)():
        try:
            want_tokens = generate(copy.deepcopy(model), inputs)
        except TooSlowError:
            raise
        except Exception:  # toy sizes do not suit every model's generate: then forward alone is compared
            want_tokens = None
    there = model.to("dtorch")
    torch.manual_seed(SEED)
    moved = {k: v.to("dtorch") if isinstance(v, Tensor) else v for k, v in inputs.items()}
    wrong = differs([host(t) for t in tensors_of(there(**moved))], want)
    if wrong or want_tokens is None:
        return False, wrong
    wrong = differs([host(t) for t in tensors_of(generate(there, moved))], tensors_of(want_tokens))
    return True, wrong and f"tokens: {wrong}"


def main() -> int:
    """Run the sweep; returns the exit code."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="print what runs on plain torch at toy size, and what does not")
    p.add_argument("--only", default=".", help="regular expression that task/model-type must contain")
    p.add_argument("--mode", choices=["inline", "local"], default="local")
    p.add_argument("--mesh", type=int, default=1, help="number of devices, each with the whole model")
    p.add_argument("--threads", type=int, default=1, help="computing threads, the same in client and workers")
    p.add_argument("--seconds", type=int, default=60, help="limit for one architecture")
    args = p.parse_args()
    warnings.filterwarnings("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    if not args.list:
        import dtorch

        dtorch.init(mode=args.mode, threads=args.threads)
        dtorch.init_device_mesh("cpu", (args.mesh,)).__enter__()
    signal.signal(signal.SIGALRM, raise_too_slow)
    good = bad = skipped = generated = 0
    types = set()
    for task, model_type, auto in architectures():
        name = f"{task}/{model_type}"
        if not re.search(args.only, name):
            continue
        start = time.time()
        signal.alarm(args.seconds)
        ran, wrong = False, ""
        try:
            with torch.no_grad():
                model, inputs, want = build(auto, model_type)
                if not args.list:
                    ran, wrong = compare(model, inputs, want)
        except (NotRunnableError, TooSlowError) as e:
            skipped += 1
            if args.list:
                print(f"skip  {name:36s} {type(e).__name__} {e}", flush=True)
            continue
        except Exception as e:
            wrong = f"{type(e).__name__}: {str(e)[:300]!r}"
        finally:
            signal.alarm(0)
        good, bad, generated = good + (not wrong), bad + bool(wrong), generated + (ran and not wrong)
        types.add(model_type)
        verdict = "run " if args.list else "FAIL" if wrong else "ok  "
        print(f"{verdict}  {name:36s} {time.time() - start:5.1f} s  {'generate ' * ran}{wrong}", flush=True)
    if args.list:
        print(f"{good} run at toy size ({len(types)} architectures), {skipped} do not")
    else:
        print(f"{good}/{good + bad} ok ({len(types)} architectures), {generated} of them generated too")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
