"""Stable Diffusion 3, FLUX.1 and other pipelines around a transformer."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from dtorch.models.demo_weights import fill

from .pieces import (
    NEGATIVE,
    PROMPT,
    SIZE,
    clip,
    flux_transformer,
    mask,
    picture,
    quiet,
    sd3_config,
    t5,
    text_features,
    vae,
)
from .registry import Place, Results, case, host, seeded

COMMON: dict[str, Any] = {"num_inference_steps": 3, "output_type": "np"}
SQUARE: dict[str, Any] = {"height": SIZE, "width": SIZE}


def sd3(cls: Any = diffusers.StableDiffusion3Pipeline, channels: int = 4, **parts: Any) -> Any:
    """A pipeline of Stable Diffusion 3 with all three text encoders."""
    config = sd3_config(in_channels=channels, out_channels=channels)
    transformer = fill(diffusers.SD3Transformer2DModel(**config), "transformer")
    text = {**clip("", projection=True), **clip("_2", projection=True), **t5("_3")}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return quiet(cls(transformer=transformer, vae=vae(channels), scheduler=scheduler, **text, **parts))


def images(pipe: Any, **arguments: Any) -> Results:
    """The pictures of a call, as one tensor."""
    return [host(pipe(generator=seeded(), **COMMON, **arguments).images)]


@case
def sd3_text(place: Place) -> Results:
    """Text to image with guidance."""
    return images(place.put(sd3()), prompt=PROMPT, negative_prompt=NEGATIVE, guidance_scale=5.0, **SQUARE)


@case
def sd3_skipped_layers(place: Place) -> Results:
    """Skip layer guidance: a third pass in some steps."""
    return images(
        place.put(sd3()), prompt=PROMPT, guidance_scale=5.0, skip_guidance_layers=[1], skip_layer_guidance_stop=0.7,
        **SQUARE,
    )  # fmt: skip


@case
def sd3_image_to_image(place: Place) -> Results:
    """A picture is noised and drawn over."""
    pipe = place.put(sd3(diffusers.StableDiffusion3Img2ImgPipeline))
    return images(pipe, prompt=PROMPT, image=picture(), strength=0.7, guidance_scale=5.0)


@case
def sd3_inpaint(place: Place) -> Results:
    """The part of a picture under a mask is drawn anew."""
    pipe = place.put(sd3(diffusers.StableDiffusion3InpaintPipeline, channels=16))
    return images(pipe, prompt=PROMPT, image=picture(), mask_image=mask(), strength=0.8, guidance_scale=5.0, **SQUARE)


@case
def sd3_controlnet(place: Place) -> Results:
    """A control net of one layer, given a picture."""
    net = fill(diffusers.SD3ControlNetModel(**sd3_config(num_layers=1)), "controlnet")
    pipe = place.put(sd3(diffusers.StableDiffusion3ControlNetPipeline, controlnet=net))
    torch.manual_seed(9)  # the picture's latents are drawn from the default generator
    return images(
        pipe, prompt=PROMPT, control_image=picture(), controlnet_conditioning_scale=0.7, guidance_scale=5.0, **SQUARE
    )


def flux(cls: Any = diffusers.FluxPipeline, **changes: Any) -> Any:
    """A pipeline of FLUX.1 with both text encoders; ``changes`` go to the transformer."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    text = {**clip(""), **t5("_2")}
    return quiet(cls(transformer=flux_transformer(**changes), vae=vae(), scheduler=scheduler, **text))


@case
def flux_dev(place: Place) -> Results:
    """Distilled guidance."""
    return images(place.put(flux()), prompt=PROMPT, guidance_scale=3.5, max_sequence_length=12, **SQUARE)


@case
def flux_true_guidance(place: Place) -> Results:
    """A negative prompt: two passes a step."""
    return images(
        place.put(flux()), prompt=PROMPT, negative_prompt=NEGATIVE, true_cfg_scale=3.0, max_sequence_length=12, **SQUARE
    )


@case
def flux_schnell(place: Place) -> Results:
    """No guidance input."""
    pipe = flux(guidance_embeds=False)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0)
    return images(place.put(pipe), prompt=PROMPT, guidance_scale=0.0, max_sequence_length=12, **SQUARE)


@case
def flux_image_to_image(place: Place) -> Results:
    """A picture is noised and drawn over."""
    pipe = place.put(flux(diffusers.FluxImg2ImgPipeline))
    return images(pipe, prompt=PROMPT, image=picture(), strength=0.7, max_sequence_length=12, **SQUARE)


@case
def flux_inpaint(place: Place) -> Results:
    """The part of a picture under a mask is drawn anew."""
    pipe = place.put(flux(diffusers.FluxInpaintPipeline))
    return images(
        pipe, prompt=PROMPT, image=picture(), mask_image=mask(), strength=0.8, max_sequence_length=12, **SQUARE
    )


@case
def flux_fill(place: Place) -> Results:
    """Mask and masked picture enter the transformer as further channels."""
    masked = 4 * 4 + 4 * 4  # packed latents of the picture, and the mask's pixels, 2 x 2 each for 2 x 2 latents
    pipe = place.put(flux(diffusers.FluxFillPipeline, in_channels=16 + masked, out_channels=16))
    return images(pipe, prompt=PROMPT, image=picture(), mask_image=mask(), max_sequence_length=12, **SQUARE)


@case
def flux_kontext(place: Place) -> Results:
    """The picture to edit stands beside the latents in the sequence."""
    pipe = place.put(flux(diffusers.FluxKontextPipeline))
    return images(
        pipe, prompt=PROMPT, image=picture(), max_sequence_length=12, max_area=SIZE * SIZE, _auto_resize=False, **SQUARE
    )


@case
def pixart_sigma(place: Place) -> Results:
    """T5 alone, DPM solver, variance in the output's second half."""
    transformer = fill(
        diffusers.PixArtTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
            sample_size=SIZE // 2, cross_attention_dim=16, caption_channels=32, patch_size=2,
            use_additional_conditions=False,
        ),
        "transformer",
    )  # fmt: skip
    pipe = quiet(
        diffusers.PixArtSigmaPipeline(
            transformer=transformer, vae=vae(quant=True), scheduler=diffusers.DPMSolverMultistepScheduler(), **t5()
        )
    )
    return images(
        place.put(pipe),
        prompt=PROMPT,
        clean_caption=False,
        use_resolution_binning=False,
        max_sequence_length=12,
        **SQUARE,
    )


@case
def sana(place: Place) -> Results:
    """Linear attention, and an autoencoder that shrinks much; its text encoder, Gemma, is replaced by features."""
    transformer = fill(
        diffusers.SanaTransformer2DModel(
            patch_size=1, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=8,
            num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=32,
            sample_size=SIZE // 2,
        ),
        "transformer",
    )  # fmt: skip
    autoencoder = fill(
        diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=8, encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
            encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
            upsample_block_type="interpolate", downsample_block_type="stride_conv", decoder_norm_types="rms_norm",
            decoder_act_fns="silu", scaling_factor=0.4,
        ),
        "vae",
    )  # fmt: skip
    pipe = quiet(
        diffusers.SanaPipeline(
            tokenizer=None, text_encoder=None, vae=autoencoder, transformer=transformer,
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    )  # fmt: skip
    pipe = place.put(pipe)
    return images(
        pipe,
        **_masked_features(place),
        guidance_scale=4.5,
        use_resolution_binning=False,
        negative_prompt=None,
        **SQUARE,
    )


def _masked_features(place: Place) -> dict[str, Any]:
    """Features of prompt and negative prompt with masks that leave out their ends."""
    kept = torch.ones(1, 8, dtype=torch.long)
    kept[:, 6:] = 0
    return {
        "prompt_embeds": place.put(text_features()),
        "prompt_attention_mask": place.put(kept),
        "negative_prompt_embeds": place.put(text_features(seed=6)),
        "negative_prompt_attention_mask": place.put(torch.ones(1, 8, dtype=torch.long)),
    }


@case
def qwen_image(place: Place) -> Results:
    """Complex rotary embeddings, and a video autoencoder for one frame; its text encoder is replaced by features."""
    transformer = fill(
        diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=(8, 4, 4),
        ),
        "transformer",
    )  # fmt: skip
    autoencoder = fill(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
            latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        "vae",
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = quiet(
        diffusers.QwenImagePipeline(
            scheduler=scheduler, vae=autoencoder, text_encoder=None, tokenizer=None, transformer=transformer
        )
    )
    pipe = place.put(pipe)
    kept = torch.ones(1, 8, dtype=torch.long)
    kept[:, 6:] = 0
    return images(
        pipe,
        prompt_embeds=place.put(text_features()),
        prompt_embeds_mask=place.put(kept),
        negative_prompt_embeds=place.put(text_features(seed=6)),
        negative_prompt_embeds_mask=place.put(torch.ones(1, 8, dtype=torch.long)),
        true_cfg_scale=4.0,
        **SQUARE,
    )
