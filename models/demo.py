"""Small random models in real diffusers folder format, made offline and the same bytes every time."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLIP_LENGTH, T5_LENGTH = 77, 512  # tokens a text encoder takes, as in the real models


@dataclass(frozen=True)
class Part:
    """One component of a demo pipeline.

    Attributes:
        kind: import path of the component's class, or "clip-tokenizer" or "t5-tokenizer".
        config: arguments of its configuration; JSON values only.
        tokenizer: for a text encoder, the component whose vocabulary and special tokens it shares.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None


def clip_config(width: int, hidden_act: str = "quick_gelu") -> dict[str, Any]:
    """Configuration of a two-layer CLIP text encoder with `width` features."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": CLIP_LENGTH,
        "hidden_act": hidden_act,
    }


def t5_config(width: int) -> dict[str, Any]:
    """Configuration of a two-layer T5 encoder with `width` features."""
    return {
        "d_model": width,
        "d_kv": width // 4,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    }


def vae_config(latent_channels: int, scaling_factor: float, shift_factor: float) -> dict[str, Any]:
    """Configuration of an autoencoder with 8 x 8 pixels per latent, as in the real models."""
    widths = [16, 32, 32, 32]
    return {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": latent_channels,
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "sample_size": 128,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
    }


def import_class(path: str) -> Any:
    """The class at the import path `path`, such as ``diffusers.FluxPipeline``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def build_pipeline_folder(pipeline: str, parts: dict[str, Part], folder: Path) -> None:
    """Write a pipeline of class `pipeline` (an import path) made of `parts` to the empty folder `folder`."""
    from .demo_tokenizers import clip_tokenizer, t5_tokenizer

    makers = {"clip-tokenizer": lambda: clip_tokenizer(CLIP_LENGTH), "t5-tokenizer": lambda: t5_tokenizer(T5_LENGTH)}
    made = {name: makers[part.kind]() for name, part in parts.items() if part.kind in makers}
    for name, part in parts.items():
        if name not in made:
            made[name] = _component(name, part, made)
    import_class(pipeline)(**made).save_pretrained(folder, safe_serialization=True)


def _component(name: str, part: Part, made: dict[str, Any]) -> Any:
    """The scheduler, or the model with its seeded weights."""
    from .demo_weights import fill

    cls = import_class(part.kind)
    config = dict(part.config)
    if part.tokenizer is not None:
        tokenizer = made[part.tokenizer]
        config |= {
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }
        return fill(cls(cls.config_class(**config)), name)
    component = cls(**config)
    return component if name == "scheduler" else fill(component, name)
