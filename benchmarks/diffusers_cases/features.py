"""What users add to a pipeline: LoRA, callbacks, batches, tiling, IP-Adapter, other precisions and generators."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import diffusers
import torch
import transformers

from dtorch.models.demo_weights import fill
from dtorch.models.weights import copy_out_of_files

from .images import COMMON, SQUARE, flux, images, sd3
from .pieces import NEGATIVE, PROMPT, WIDTH, picture
from .registry import Place, Results, case, host, noise, seeded
from .stable import sd15, sdxl

_SHORT: dict[str, Any] = {"prompt": PROMPT, "max_sequence_length": 12, **SQUARE}


def _lora(model: Any, targets: list[str]) -> dict[str, torch.Tensor]:
    """LoRA weights for some linear layers of a model, as a training run would leave them."""
    import peft

    model.add_adapter(peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    weights = peft.get_peft_model_state_dict(model)
    return {name: noise(*value.shape, seed=i + 20) * 0.2 for i, (name, value) in enumerate(weights.items())}


_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


@case
def sd15_lora(place: Place) -> Results:
    """LoRA of the UNet saved, loaded, scaled, fused, and taken off again."""
    pipe = place.put(sd15())
    with tempfile.TemporaryDirectory() as folder:
        diffusers.StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=_lora(sd15().unet, _ATTENTION))
        pipe.load_lora_weights(folder, adapter_name="style")
    out = [*images(pipe, prompt=PROMPT, **SQUARE)]
    pipe.set_adapters(["style"], [0.5])
    out += images(pipe, prompt=PROMPT, **SQUARE)
    pipe.fuse_lora()
    out += images(pipe, prompt=PROMPT, **SQUARE)
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    return [*out, *images(pipe, prompt=PROMPT, **SQUARE)]


@case
def sd3_lora(place: Place) -> Results:
    """LoRA of the transformer."""
    pipe = place.put(sd3())
    with tempfile.TemporaryDirectory() as folder:
        layers = _lora(sd3().transformer, [*_ATTENTION, "add_k_proj"])
        diffusers.StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=layers)
        pipe.load_lora_weights(folder)
    return images(pipe, **_SHORT)


@case
def flux_lora(place: Place) -> Results:
    """Two LoRAs at once, loaded before the pipeline moves."""
    pipe = flux()
    with tempfile.TemporaryDirectory() as folder:
        for name, targets in (("a", _ATTENTION), ("b", ["proj_mlp", "net.2"])):
            layers = _lora(flux().transformer, targets)
            diffusers.FluxPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
            pipe.load_lora_weights(folder, adapter_name=name)
    pipe.set_adapters(["a", "b"], [0.7, 0.4])
    return images(place.put(pipe), **_SHORT)


@case
def callback(place: Place) -> Results:
    """A callback that reads, changes and ends: latents are shifted, guidance stops, the last step is left out."""
    pipe, seen = place.put(sd3()), []

    def after(pipe: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(host(tensors["latents"]).clone())
        tensors["latents"] = tensors["latents"] * 0.9 + 0.01 * step
        if step == 1:
            pipe._guidance_scale = 0.0
            for name in ("prompt_embeds", "pooled_prompt_embeds"):
                tensors[name] = tensors[name].chunk(2)[1]
        pipe._interrupt = step == 3
        return tensors

    out = pipe(
        prompt=PROMPT, num_inference_steps=5, output_type="latent", generator=seeded(), callback_on_step_end=after,
        callback_on_step_end_tensor_inputs=["latents", "prompt_embeds", "pooled_prompt_embeds"], **SQUARE,
    ).images  # fmt: skip
    return [*seen, host(out)]


@case
def several_images(place: Place) -> Results:
    """Three pictures for a prompt, each with a generator of its own."""
    pipe = place.put(sd3())
    out = pipe(
        prompt=PROMPT, num_images_per_prompt=3, generator=[seeded(i) for i in range(3)], **COMMON, **SQUARE
    ).images
    return [host(out)]


@case
def prompt_batch(place: Place) -> Results:
    """Two prompts with two negative ones, two pictures each."""
    both = {"prompt": [PROMPT, "a red house"], "negative_prompt": [NEGATIVE, "dark"], "num_images_per_prompt": 2}
    return [*images(place.put(sd15()), **both, **SQUARE), *images(place.put(sdxl()), **both, **SQUARE)]


@case
def flux_batch(place: Place) -> Results:
    """Two prompts, two pictures each."""
    pair = _SHORT | {"prompt": [PROMPT, "a red house"]}
    return images(place.put(flux()), num_images_per_prompt=2, **pair)


@case
def vae_tiling(place: Place) -> Results:
    """Tiles that overlap, blended; decoding and encoding."""
    pipe = sd3()
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 8
    pipe = place.put(pipe)
    latents = pipe.vae.encode(place.put(picture())).latent_dist.mean
    return [*images(pipe, prompt=PROMPT, **SQUARE), host(latents)]


@case
def vae_slicing(place: Place) -> Results:
    """Pictures decoded one after the other."""
    pipe = place.put(sd15())
    pipe.vae.enable_slicing()
    return images(pipe, prompt=[PROMPT, "a red house"], **SQUARE)


@case
def attention_slicing(place: Place) -> Results:
    """Attention computed for one head at a time."""
    pipe = place.put(sd15())
    pipe.enable_attention_slicing(1)
    return images(pipe, prompt=PROMPT, **SQUARE)


@case
def ip_adapter(place: Place) -> Results:
    """A picture as a prompt: a CLIP vision encoder and further keys and values in the UNet."""
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, projection_dim=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8,
    )  # fmt: skip
    encoder = fill(transformers.CLIPVisionModelWithProjection(config), "image_encoder")
    extractor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pipe = place.put(sd15(image_encoder=encoder, feature_extractor=extractor))
    pipe.unet._load_ip_adapter_weights([_ip_adapter_weights(pipe.unet)])
    pipe.set_ip_adapter_scale(0.6)
    shown = extractor(picture(), return_tensors="pt", do_rescale=False).pixel_values
    return images(pipe, prompt=PROMPT, ip_adapter_image=shown, **SQUARE)


def _ip_adapter_weights(unet: Any) -> dict[str, Any]:
    """Weights of an IP-Adapter in the file's form, for the cross attentions of a UNet."""
    layers: dict[str, torch.Tensor] = {}
    number = 1
    for name in unet.attn_processors:
        if not name.endswith("attn2.processor"):
            continue
        attention = unet.get_submodule(name.removesuffix(".processor"))
        for kind in ("k", "v"):
            layers[f"{number}.to_{kind}_ip.weight"] = noise(attention.inner_dim, WIDTH, seed=40 + number) * 0.2
        number += 2
    tokens = 4
    projection = {
        "proj.weight": noise(tokens * WIDTH, WIDTH, seed=90) * 0.2,
        "proj.bias": torch.zeros(tokens * WIDTH),
        "norm.weight": torch.ones(WIDTH),
        "norm.bias": torch.zeros(WIDTH),
    }
    return {"image_proj": projection, "ip_adapter": layers}


@case
def sd3_bfloat16(place: Place) -> Results:
    """Everything in bfloat16."""
    return images(place.put(sd3().to(torch.bfloat16)), **_SHORT)


@case
def flux_float16(place: Place) -> Results:
    """Everything in float16."""
    return images(place.put(flux().to(torch.float16)), **_SHORT)


@case
def autocast(place: Place) -> Results:
    """Matrix products and convolutions in bfloat16, weights in float32."""
    pipe = place.put(sd15())
    with torch.autocast(place.device, dtype=torch.bfloat16):
        return images(pipe, prompt=PROMPT, **SQUARE)


@case
def channels_last(place: Place) -> Results:
    """Weights and activations in the other memory order."""
    pipe = place.put(sd15())
    for part in (pipe.unet, pipe.vae):
        part.to(memory_format=torch.channels_last)
    return images(pipe, prompt=PROMPT, **SQUARE)


@case
def textual_inversion(place: Place) -> Results:
    """A word of the user's own."""
    pipe = place.put(sd15())
    pipe.tokenizer = copy.deepcopy(pipe.tokenizer)
    pipe.load_textual_inversion({"<mine>": noise(1, WIDTH)})
    return images(pipe, prompt="a photo of <mine>", **SQUARE)


@case
def first_block_cache(place: Place) -> Results:
    """Blocks are left out while the first one's output hardly changes: a decision, and so a read, in each step."""
    pipe = place.put(flux())
    pipe.transformer.enable_cache(diffusers.hooks.FirstBlockCacheConfig(threshold=0.2))
    return images(pipe, **_SHORT)


@case
def device_generator(place: Place) -> Results:
    """Noise drawn where the model is."""
    pipe = place.put(sd15())
    generator = torch.Generator(place.device).manual_seed(4)
    out = pipe(prompt=PROMPT, eta=0.5, generator=generator, **COMMON, **SQUARE).images
    torch.manual_seed(11)
    return [host(out), host(pipe(prompt=PROMPT, **COMMON, **SQUARE).images)]


@case
def saved_and_loaded(place: Place) -> Results:
    """The pipeline saved from where it is, loaded again, and moved."""
    with tempfile.TemporaryDirectory() as folder:
        place.put(sd3()).save_pretrained(folder)
        pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
        for part in (pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3, pipe.transformer, pipe.vae):
            copy_out_of_files(part)
    pipe.set_progress_bar_config(disable=True)
    return images(place.put(pipe), **_SHORT)


@case
def model_offload(place: Place) -> Results:
    """accelerate's hooks bring each model to the device when it is used."""
    pipe = sd15()
    if place.device != "cpu":
        pipe.enable_model_cpu_offload(device=place.device)
    return images(pipe, prompt=PROMPT, **SQUARE)


@case
def sequential_offload(place: Place) -> Results:
    """The same for each layer."""
    pipe = sd15()
    if place.device != "cpu":
        pipe.enable_sequential_cpu_offload(device=place.device)
    return images(pipe, prompt=PROMPT, **SQUARE)
