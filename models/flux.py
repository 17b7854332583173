"""The demo of FLUX.1: its real architecture at toy size."""

from __future__ import annotations

from .demo import Part, clip_config, t5_config, vae_config

_CLIP_WIDTH, _T5_WIDTH, _LATENT_CHANNELS = 64, 128, 16

DEMO_PARTS: dict[str, Part] = {
    "tokenizer": Part("clip-tokenizer"),
    "tokenizer_2": Part("t5-tokenizer"),
    "text_encoder": Part("transformers.CLIPTextModel", clip_config(_CLIP_WIDTH), tokenizer="tokenizer"),
    "text_encoder_2": Part("transformers.T5EncoderModel", t5_config(_T5_WIDTH), tokenizer="tokenizer_2"),
    "transformer": Part(
        "diffusers.FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4 * _LATENT_CHANNELS,  # the pipeline packs 2 x 2 latents into one token
            "num_layers": 1,
            "num_single_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "joint_attention_dim": _T5_WIDTH,
            "pooled_projection_dim": _CLIP_WIDTH,
            "guidance_embeds": True,
            "axes_dims_rope": [8, 12, 12],  # sums to attention_head_dim
        },
    ),
    "vae": Part("diffusers.AutoencoderKL", vae_config(_LATENT_CHANNELS, scaling_factor=0.3611, shift_factor=0.1159)),
    "scheduler": Part("diffusers.FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
}
