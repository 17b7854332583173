"""Small models with random weights, on plain torch and on the mesh, and prompts for them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from benchmarks.hf_toys import build, tensors_of

NEW_TOKENS = 8


@cache
def toy(auto: str, model_type: str) -> tuple[Any, dict[str, Any]]:
    """A model that runs on plain torch, and inputs for it; neither may be changed."""
    import transformers

    with torch.no_grad():
        model, inputs, _ = build(getattr(transformers, auto), model_type)
    return model, inputs


def on_mesh(value: Any) -> Any:
    """A copy of a model or a tensor on the mesh; what is neither stays as it is."""
    if isinstance(value, torch.nn.Module):
        return copy.deepcopy(value).to("dtorch")
    return value.to("dtorch") if isinstance(value, Tensor) else value


def same(got: Any, want: Any) -> None:
    """Every tensor equal to the bit, where nan equals nan; and there are some."""
    found, expected = tensors_of(got), tensors_of(want)
    assert len(found) == len(expected) > 0
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.device.type == "dtorch"
        value = a.detach().to_torch()  # type: ignore[attr-defined]
        assert value.dtype == b.dtype
        assert value.shape == b.shape
        assert torch.equal(torch.nan_to_num(value, 0.25), torch.nan_to_num(b, 0.25)), f"tensor {i} differs"


def prompt(padding: int = 0) -> dict[str, Tensor]:
    """Two rows of token numbers with their attention mask, the first padded on the left."""
    ids = torch.randint(10, 300, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], seed: int = 3, tokens: int = NEW_TOKENS, **options: Any) -> Any:
    """What a model generates after the inputs, from a seed; always so many tokens."""
    torch.manual_seed(seed)
    return model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **options)


def moved(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs on the mesh."""
    return {name: on_mesh(value) for name, value in inputs.items()}
