"""Unmodified pipelines give the same bits on a mesh of one device as on plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.diffusers_cases import CASES, Place
from benchmarks.diffusers_sweep import compare

LOCAL = [
    "sd3-text",
    "sd3-inpaint",
    "sd3-controlnet",
    "flux-dev",
    "flux-fill",
    "flux-kontext",
    "sd15-lora",
    "sdxl-text",
    "prompt-batch",
    "device-generator",
]
INLINE = [
    "sd3-image-to-image",
    "flux-image-to-image",
    "flux-schnell",
    "sd15-text",
    "pixart-sigma",
    "sana",
    "qwen-image",
    "ltx",
    "wan",
    "flux-lora",
    "callback",
    "several-images",
    "vae-tiling",
    "vae-slicing",
    "ip-adapter",
    "saved-and-loaded",
    "model-offload",
    "sd3-bfloat16",
    "autocast",
    "channels-last",
    "textual-inversion",
    "first-block-cache",
]
# A callback that looks at latents, and a cache that decides by values, read once in each step.
READS = {"callback": 1, "first-block-cache": 1}


@pytest.mark.parametrize(
    ("name", "reads"), [(n, "local") for n in LOCAL] + [(n, "inline") for n in INLINE], indirect=["reads"]
)
def test_same_bits(name: str, reads: Callable[[], int]) -> None:
    want = CASES[name](Place("cpu"))
    place = Place("dtorch", reads)
    assert not compare(CASES[name](place), want)
    assert all(n == READS.get(name, 0) for n in place.reads), f"synchronising reads in each step: {place.reads}"


@pytest.mark.parametrize("reads", ["inline", "local"], indirect=True)
@pytest.mark.parametrize("name", ["sd3-text", "flux-dev"])
def test_nothing_is_read_before_the_picture(name: str, reads: Callable[[], int]) -> None:
    before = reads()
    place = Place("dtorch", reads)
    CASES[name](place)
    assert len(place.reads) == 2  # three steps
    assert not any(place.reads)
    assert reads() - before == 1  # the picture
