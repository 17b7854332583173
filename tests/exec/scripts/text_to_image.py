"""Draws pictures from text with a Stable Diffusion pipeline of small random models."""

import argparse
import hashlib

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def build_pipeline():
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(letter + "</w>" for letter in alphabet)]
    tokenizer = CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=32)
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokens),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    )
    scheduler = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", default="a photo of an astronaut riding a horse")
    parser.add_argument("--negative_prompt", default="blurry")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()

    torch.manual_seed(0)
    pipe = build_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe = pipe.to("cuda")
    for scheduler in (DDIMScheduler, EulerDiscreteScheduler):
        pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
        image = pipe(
            args.prompt,
            negative_prompt=args.negative_prompt,
            num_inference_steps=args.steps,
            guidance_scale=5.0,
            generator=torch.Generator("cuda").manual_seed(42),
        ).images[0]
        pixels = np.asarray(image)
        print(
            scheduler.__name__, pixels.shape, f"{pixels.mean():.4f}", hashlib.sha256(pixels.tobytes()).hexdigest()[:16]
        )
        if args.out:
            image.save(args.out)

    pipe = pipe.to(dtype=torch.bfloat16)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    images = pipe(
        [args.prompt, "a cat"],
        num_inference_steps=args.steps,
        output_type="np",
        num_images_per_prompt=2,
        generator=[torch.Generator(device="cuda").manual_seed(i) for i in range(4)],
    ).images
    print("bfloat16", images.shape, hashlib.sha256(images.tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
