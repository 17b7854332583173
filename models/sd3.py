"""The demo of Stable Diffusion 3: its real architecture at toy size."""

from __future__ import annotations

from .demo import Part, clip_config, t5_config, vae_config

# Two CLIP encoders stand beside each other in the text features, padded to the width of T5; their pooled projections
# are concatenated too.
_CLIP_WIDTH, _T5_WIDTH, _LATENT_CHANNELS = 64, 128, 16

DEMO_PARTS: dict[str, Part] = {
    "tokenizer": Part("clip-tokenizer"),
    "tokenizer_2": Part("clip-tokenizer"),
    "tokenizer_3": Part("t5-tokenizer"),
    "text_encoder": Part("transformers.CLIPTextModelWithProjection", clip_config(_CLIP_WIDTH), tokenizer="tokenizer"),
    "text_encoder_2": Part(
        "transformers.CLIPTextModelWithProjection",
        clip_config(_CLIP_WIDTH, hidden_act="gelu"),
        tokenizer="tokenizer_2",
    ),
    "text_encoder_3": Part("transformers.T5EncoderModel", t5_config(_T5_WIDTH), tokenizer="tokenizer_3"),
    "transformer": Part(
        "diffusers.SD3Transformer2DModel",
        {
            "sample_size": 16,
            "patch_size": 2,
            "in_channels": _LATENT_CHANNELS,
            "out_channels": _LATENT_CHANNELS,
            "num_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "joint_attention_dim": _T5_WIDTH,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 2 * _CLIP_WIDTH,
            "pos_embed_max_size": 32,
        },
    ),
    "vae": Part("diffusers.AutoencoderKL", vae_config(_LATENT_CHANNELS, scaling_factor=1.5305, shift_factor=0.0609)),
    "scheduler": Part("diffusers.FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
}
