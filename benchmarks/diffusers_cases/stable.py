"""Stable Diffusion 1.5 and XL: pipelines around a UNet."""

from __future__ import annotations

from typing import Any

import diffusers

from dtorch.models.demo_weights import fill

from .images import SQUARE, images
from .pieces import NEGATIVE, PROMPT, WIDTH, clip, mask, picture, quiet, unet, vae
from .registry import Place, Results, case, host, seeded

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def sd15(cls: Any = diffusers.StableDiffusionPipeline, **parts: Any) -> Any:
    """A pipeline of Stable Diffusion 1.5 without safety checker, as it is published: PNDM."""
    everything: dict[str, Any] = {
        "vae": vae(quant=True),
        "unet": unet(),
        "scheduler": diffusers.PNDMScheduler(skip_prk_steps=True, steps_offset=1, **BETAS),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
        **clip(""),
    }
    return quiet(cls(**everything | parts))


def sdxl(cls: Any = diffusers.StableDiffusionXLPipeline, **parts: Any) -> Any:
    """A pipeline of Stable Diffusion XL: two text encoders, sizes as further conditions, Euler."""
    conditioned = unet(
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(1, 2),
        use_linear_projection=True,
    )
    everything: dict[str, Any] = {
        "vae": vae(quant=True),
        "unet": conditioned,
        "scheduler": diffusers.EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **BETAS),
        **clip(""),
        **clip("_2", projection=True),
    }
    return quiet(cls(**everything | parts))


@case
def sd15_text(place: Place) -> Results:
    """Text to image with guidance."""
    return images(place.put(sd15()), prompt=PROMPT, negative_prompt=NEGATIVE, **SQUARE)


@case
def sd15_image_to_image(place: Place) -> Results:
    """A picture is noised and drawn over."""
    pipe = place.put(sd15(diffusers.StableDiffusionImg2ImgPipeline))
    return images(pipe, prompt=PROMPT, image=picture(), strength=0.8)


@case
def sd15_inpaint(place: Place) -> Results:
    """A UNet of nine channels: latents, mask, masked picture."""
    pipe = place.put(sd15(diffusers.StableDiffusionInpaintPipeline, unet=unet(in_channels=9)))
    return images(pipe, prompt=PROMPT, image=picture(), mask_image=mask(), **SQUARE)


@case
def sd15_controlnet(place: Place) -> Results:
    """A control net made like the UNet."""
    net = fill(
        diffusers.ControlNetModel(
            block_out_channels=(8, 16), layers_per_block=1, in_channels=4, norm_num_groups=4, attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=WIDTH,
            conditioning_embedding_out_channels=(8, 16),
        ),
        "controlnet",
    )  # fmt: skip
    pipe = place.put(sd15(diffusers.StableDiffusionControlNetPipeline, controlnet=net))
    return images(pipe, prompt=PROMPT, image=picture(), **SQUARE)


@case
def sd15_free_u(place: Place) -> Results:
    """FreeU filters the skip connections by Fourier transforms."""
    pipe = place.put(sd15())
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    return images(pipe, prompt=PROMPT, **SQUARE)


@case
def sdxl_text(place: Place) -> Results:
    """Text to image with guidance."""
    return images(place.put(sdxl()), prompt=PROMPT, negative_prompt=NEGATIVE, **SQUARE)


@case
def sdxl_image_to_image(place: Place) -> Results:
    """A picture is noised and drawn over."""
    pipe = place.put(sdxl(diffusers.StableDiffusionXLImg2ImgPipeline))
    return images(pipe, prompt=PROMPT, image=picture(), strength=0.8)


@case
def sdxl_inpaint(place: Place) -> Results:
    """The part of a picture under a mask is drawn anew."""
    pipe = place.put(sdxl(diffusers.StableDiffusionXLInpaintPipeline))
    return images(pipe, prompt=PROMPT, image=picture(), mask_image=mask(), strength=0.9, **SQUARE)


@case
def sdxl_refined(place: Place) -> Results:
    """One pipeline begins, another one ends."""
    call = {"prompt": PROMPT, "generator": seeded(), "num_inference_steps": 4}
    base = place.put(sdxl())
    latents = base(denoising_end=0.5, output_type="latent", **call, **SQUARE).images
    refiner = place.put(sdxl(diffusers.StableDiffusionXLImg2ImgPipeline))
    return [host(refiner(denoising_start=0.5, image=latents, output_type="np", **call).images)]
