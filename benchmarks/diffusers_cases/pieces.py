"""Components at toy size. Pictures have 2 x 2 pixels for each latent, text has 32 features."""

from __future__ import annotations

from functools import cache
from typing import Any

import diffusers
import torch
import transformers

from dtorch.models.demo import clip_config, t5_config, vae_config
from dtorch.models.demo_tokenizers import clip_tokenizer, t5_tokenizer
from dtorch.models.demo_weights import fill

from .registry import noise

WIDTH = 32  # features of a text encoder
T5_LENGTH = 12
PROMPT = "a photo of a cat by the sea"
NEGATIVE = "a blurry picture"
SIZE = 32  # pixels along the side of a picture


@cache
def _clip_tokenizer() -> Any:
    return clip_tokenizer(77)


@cache
def _t5_tokenizer() -> Any:
    return t5_tokenizer(T5_LENGTH)


def clip(name: str, *, projection: bool = False) -> dict[str, Any]:
    """A CLIP text encoder and its tokenizer; ``name`` is the number that the pipeline's arguments end in."""
    tokenizer = _clip_tokenizer()
    special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.CLIPTextConfig(**clip_config(WIDTH), **special, vocab_size=len(tokenizer))
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return {f"tokenizer{name}": tokenizer, f"text_encoder{name}": fill(cls(config), f"text_encoder{name}")}


def t5(name: str = "") -> dict[str, Any]:
    """A T5 encoder and its tokenizer, named likewise."""
    tokenizer = _t5_tokenizer()
    config = transformers.T5Config(**t5_config(WIDTH), vocab_size=len(tokenizer))
    return {
        f"tokenizer{name}": tokenizer,
        f"text_encoder{name}": fill(transformers.T5EncoderModel(config), f"text_encoder{name}"),
    }


def vae(latent_channels: int = 4, *, quant: bool = False, **changes: Any) -> Any:
    """An autoencoder of two blocks; ``quant`` adds the 1 x 1 convolutions of the older models."""
    widths = [8, 16]
    config = vae_config(latent_channels, scaling_factor=1.5, shift_factor=0.06) | {
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "norm_num_groups": 4,
        "sample_size": SIZE,
        "use_quant_conv": quant,
        "use_post_quant_conv": quant,
    }
    if quant:
        config["shift_factor"] = None
    return fill(diffusers.AutoencoderKL(**config | changes), "vae")


def unet(**changes: Any) -> Any:
    """A UNet of two blocks with cross attention to the text features."""
    config: dict[str, Any] = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "sample_size": SIZE // 2,
        "in_channels": 4,
        "out_channels": 4,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
    }
    return fill(diffusers.UNet2DConditionModel(**config | changes), "unet")


def sd3_config(**changes: Any) -> dict[str, Any]:
    """Configuration of the transformer of Stable Diffusion 3, and of its control nets."""
    return {
        "sample_size": SIZE // 2,
        "patch_size": 2,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "joint_attention_dim": WIDTH,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 2 * WIDTH,
        "pos_embed_max_size": SIZE // 2,
    } | changes


def flux_transformer(**changes: Any) -> Any:
    """The transformer of FLUX.1 with one block of each kind."""
    config: dict[str, Any] = {
        "patch_size": 1,
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "guidance_embeds": True,
        "axes_dims_rope": [4, 6, 6],
    }
    return fill(diffusers.FluxTransformer2DModel(**config | changes), "transformer")


def picture(*size: int, seed: int = 3) -> torch.Tensor:
    """A picture (1, 3, height, width) with values from 0 to 1."""
    height, width = size or (SIZE, SIZE)
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def mask() -> torch.Tensor:
    """A mask (1, 1, SIZE, SIZE) of its left half."""
    out = torch.zeros(1, 1, SIZE, SIZE)
    out[..., : SIZE // 2] = 1
    return out


def text_features(length: int = 8, width: int = WIDTH, count: int = 1, seed: int = 5) -> torch.Tensor:
    """What a text encoder would give: (count, length, width)."""
    return noise(count, length, width, seed=seed)


def quiet(pipe: Any) -> Any:
    """The pipeline without its progress bar."""
    pipe.set_progress_bar_config(disable=True)
    return pipe
