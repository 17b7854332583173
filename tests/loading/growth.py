"""A program for ``test_pretrained``: loads models of some 300 MB in several ways, and prints how much it grew each time.

    python growth.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import dtorch
from dtorch.patches.diffusers_loading import DIFFUSERS_LOADING
from dtorch.patches.transformers_loading import TRANSFORMERS_LOADING


def write_llama(folder: Path, hidden: int, layers: int) -> None:
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, vocab_size=24 * hidden,
        num_attention_heads=hidden // 64,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        write_weights(LlamaForCausalLM(config), folder / "model.safetensors")


def write_sd3(folder: Path, hidden: int, layers: int) -> None:
    with torch.device("meta"):
        model = SD3Transformer2DModel(
            sample_size=8, num_layers=layers, attention_head_dim=64, num_attention_heads=hidden // 64,
            joint_attention_dim=64, caption_projection_dim=hidden, pooled_projection_dim=64, pos_embed_max_size=8,
        )  # fmt: skip
    model.save_config(folder)
    write_weights(model, folder / "diffusion_pytorch_model.safetensors")


def write_weights(model: torch.nn.Module, path: Path) -> None:
    weights = {
        name: torch.empty(t.shape, device="cpu").uniform_(-0.02, 0.02) for name, t in model.state_dict().items()
    }
    save_file(weights, path, metadata={"format": "pt"})


def on_device(cls: Any, folder: Path) -> Any:
    return cls.from_pretrained(folder, device_map={"": "dtorch:0"})


def as_bfloat16(cls: Any, folder: Path) -> Any:
    name = "dtype" if cls is LlamaForCausalLM else "torch_dtype"
    return cls.from_pretrained(folder, device_map={"": "dtorch:0"}, **{name: torch.bfloat16})


def moved(cls: Any, folder: Path) -> Any:
    return cls.from_pretrained(folder).to("dtorch")


def cut(cls: Any, folder: Path) -> Any:
    return dtorch.parallelize(
        cls.from_pretrained(folder), dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    )


WAYS: list[Callable[[Any, Path], Any]] = [on_device, as_bfloat16, moved, cut]


def peak_kb() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for patch in (TRANSFORMERS_LOADING, DIFFUSERS_LOADING):
        patch.apply()
    dtorch.DeviceMesh("cpu", [0])
    torch.zeros(1, device="dtorch")
    for cls in (LlamaForCausalLM, SD3Transformer2DModel):
        for way in WAYS:  # what they import does not count
            way(cls, folder / f"{cls.__name__}-tiny")
    dtorch.synchronize()
    for cls in (LlamaForCausalLM, SD3Transformer2DModel):
        for way in WAYS:
            before = peak_kb()
            model = way(cls, folder / cls.__name__)
            dtorch.synchronize()
            elements = sum(p.numel() for p in model.parameters())
            print(cls.__name__, way.__name__, (peak_kb() - before) >> 10, elements >> 18, flush=True)
            del model


def write(folder: Path) -> None:
    """The models, big and tiny."""
    for suffix, hidden, layers in (("-tiny", 64, 1), ("", 1024, 4)):
        write_llama(folder / f"LlamaForCausalLM{suffix}", hidden, layers)
        write_sd3(folder / f"SD3Transformer2DModel{suffix}", hidden, max(1, layers - 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
