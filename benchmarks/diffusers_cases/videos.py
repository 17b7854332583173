"""Video pipelines."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from dtorch.models.demo_weights import fill

from .pieces import NEGATIVE, PROMPT, quiet, t5, text_features
from .registry import Place, Results, case, host, seeded

_CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np", "height": 32, "width": 32}


def frames(pipe: Any, **arguments: Any) -> Results:
    """The frames of a call, as one tensor."""
    return [host(pipe(generator=seeded(), **_CALL, **arguments).frames)]


@case
def ltx(place: Place) -> Results:
    """LTX-Video: T5, a transformer over space and time, a causal autoencoder."""
    transformer = fill(
        diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
            num_layers=1, caption_channels=32,
        ),
        "transformer",
    )  # fmt: skip
    autoencoder = fill(
        diffusers.AutoencoderKLLTXVideo(
            latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False,
        ),
        "vae",
    )  # fmt: skip
    autoencoder.use_framewise_encoding = autoencoder.use_framewise_decoding = False
    pipe = diffusers.LTXPipeline(
        transformer=transformer, vae=autoencoder, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **t5()
    )
    return frames(place.put(quiet(pipe)), prompt=PROMPT, negative_prompt=NEGATIVE, num_frames=9, max_sequence_length=12)


def _wan() -> dict[str, Any]:
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=64, ffn_dim=32, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    autoencoder = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return {"transformer": fill(transformer, "transformer"), "vae": fill(autoencoder, "vae")}


@case
def wan(place: Place) -> Results:
    """Wan: UMT5, complex rotary embeddings, UniPC on flow sigmas."""
    text = t5()
    config = transformers.UMT5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        is_encoder_decoder=False, use_cache=False, vocab_size=len(text["tokenizer"]),
    )  # fmt: skip
    text["text_encoder"] = fill(transformers.UMT5EncoderModel(config), "text_encoder")
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    pipe = diffusers.WanPipeline(scheduler=scheduler, **text, **_wan())
    return frames(place.put(quiet(pipe)), prompt=PROMPT, negative_prompt=NEGATIVE, num_frames=5, max_sequence_length=12)


@case
def wan_features(place: Place) -> Results:
    """Two videos at once from text features, Euler steps."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    pipe = diffusers.WanPipeline(scheduler=scheduler, tokenizer=None, text_encoder=None, **_wan())
    return frames(
        place.put(quiet(pipe)),
        prompt_embeds=place.put(text_features(count=2)),
        negative_prompt_embeds=place.put(text_features(count=2, seed=6)),
        num_frames=5,
    )
