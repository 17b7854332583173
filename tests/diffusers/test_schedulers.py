"""Every scheduler: the same latents after each step, and no synchronising read in any of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.diffusers_cases import Place
from benchmarks.diffusers_cases.schedulers import SCHEDULERS, loop


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_same_latents_and_no_reads(name: str, reads: Callable[[], int]) -> None:
    want = loop(Place("cpu"), name)
    place = Place("dtorch", reads)
    got = loop(place, name)
    assert len(got) == len(want) > 3
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"step {i}: largest difference {(a - b).abs().max()}"
    assert len(place.reads) == len(want) - 1
    assert not any(place.reads), f"synchronising reads in each step: {place.reads}"
