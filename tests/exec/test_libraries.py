"""What Hugging Face libraries load in a program under `dtorch exec`, which imports none that the program does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import os, sys
import torch
print(sorted({"transformers", "diffusers", "accelerate", "safetensors"} & set(sys.modules)))

from diffusers import UNet2DModel
from diffusers.models import model_loading_utils
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from dtorch import patches

config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
model = LlamaForCausalLM(config)
model.save_pretrained("llama")
there = LlamaForCausalLM.from_pretrained("llama", device_map="auto", dtype=torch.bfloat16)
print({str(p.device) for p in there.parameters()}, torch.equal(there.lm_head.weight.cpu(), model.lm_head.weight.bfloat16()))
print({str(t.device) for t in load_file("llama/model.safetensors", device="cuda").values()})

unet = UNet2DModel(
    sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
    down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
)
unet.save_pretrained("unet")
there = UNet2DModel.from_pretrained("unet", device_map="cuda", torch_dtype=torch.bfloat16)
print({str(p.device) for p in there.parameters()}, torch.equal(there.conv_in.weight.cpu(), unet.conv_in.weight.bfloat16()))
print(*sorted(patch.name for patch in patches.available() if patch.applied))

os.truncate("llama/model.safetensors", os.path.getsize("llama/model.safetensors") - 1000)
try:
    LlamaForCausalLM.from_pretrained("llama", device_map="cuda")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_loading_under_exec(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "dtorch.cli", "exec", "--mode", "inline", "program.py"],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *lines, error = done.stdout.splitlines()
    assert lines == [
        "[]",
        "{'cuda:0'} True",
        "{'cuda:0'}",
        "{'cuda:0'} True",
        "cuda-amp cuda-devices cuda-runtime cuda-streams diffusers-loading safetensors-loading transformers-loading",
    ]
    assert error.startswith("LoadError llama/model.safetensors was cut off: ")
