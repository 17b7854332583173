"""``from_pretrained`` into a mesh: the program holds no weights, and a bad file leaves nothing half loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import dtorch
from dtorch.client import graph
from dtorch.core.errors import LoadError
from dtorch.patches.diffusers_loading import DIFFUSERS_LOADING
from dtorch.patches.transformers_loading import TRANSFORMERS_LOADING
from tests.engine.helpers import ROOT, both_modes, mesh
from tests.loading import growth
from tests.loading.conftest import equal

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    for patch in (TRANSFORMERS_LOADING, DIFFUSERS_LOADING):
        patch.apply()
    yield
    for patch in (TRANSFORMERS_LOADING, DIFFUSERS_LOADING):
        patch.revert()


@pytest.fixture(scope="module")
def source() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


@pytest.fixture
def folder(source: Any, tmp_path: Path) -> Path:
    source.save_pretrained(tmp_path)
    return tmp_path


@both_modes
@pytest.mark.parametrize("device_map", ["dtorch", "dtorch:0", {"": "dtorch:0"}, {"": 0}], ids=str)
def test_device_map(mode, folder, source, device_map):
    mesh(2)
    torch.zeros(1, device="dtorch")
    for options in ({}, {"dtype": torch.bfloat16}):
        model = LlamaForCausalLM.from_pretrained(folder, device_map=device_map, **options)
        assert {p.device.type for p in model.parameters()} == {"dtorch"}
        for name, want in source.state_dict().items():
            assert equal(model.state_dict()[name], want.to(options.get("dtype")))


def test_the_default_mesh_is_meant(folder, source):
    """Also in the threads that load."""
    first, second = mesh(1), mesh(2)
    torch.zeros(1, device="dtorch")
    dtorch.zeros(1, device_mesh=first)
    with second:
        model = LlamaForCausalLM.from_pretrained(folder, device_map="dtorch")
    assert {p.device_mesh.devices for p in model.parameters()} == {(0, 1)}
    other = dtorch.Graph(mode="inline")
    with other.device_mesh_guard(dtorch.DeviceMesh("cpu", [0, 1, 2])):
        model = LlamaForCausalLM.from_pretrained(folder, device_map="dtorch")
        assert {p._h.session for p in model.parameters()} == {other.session}
        assert equal(model.lm_head.weight, source.lm_head.weight.detach())
    other.close()


@pytest.fixture
def empty_session(mode: str) -> Any:
    dtorch.shutdown()
    dtorch.init(mode="inline")
    mesh(1)
    torch.zeros(1, device="dtorch")
    return graph.current_session().link._executor.store  # type: ignore[attr-defined]


def test_a_damaged_file(empty_session, folder):
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 4000)
    for _ in range(2):
        with pytest.raises(LoadError, match=r"model\.safetensors was cut off: '[\w.]+' ends at byte \d+"):
            LlamaForCausalLM.from_pretrained(folder, device_map="dtorch:0")
    file.write_bytes(b"\x02\0\0\0\0\0\0\0{}rest")
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged: "):
        LlamaForCausalLM.from_pretrained(folder, device_map="dtorch:0")
    dtorch.synchronize()
    assert not empty_session


def test_a_missing_file(empty_session, source, tmp_path):
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    gone = index["weight_map"]["lm_head.weight"]
    (tmp_path / gone).unlink()
    with pytest.raises(OSError, match=gone):
        LlamaForCausalLM.from_pretrained(tmp_path, device_map="dtorch:0")
    dtorch.synchronize()
    assert not empty_session


def test_a_file_that_does_not_fit(empty_session, folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:7].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatch") as caught:
        LlamaForCausalLM.from_pretrained(folder, device_map="dtorch:0")
    del caught
    dtorch.synchronize()
    assert not [v for v in empty_session.values() if v[0].shape == (7, 64)]


def test_diffusers_converts_where_the_weights_live(empty_session, tmp_path):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    source = AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, layers_per_block=1)
    source.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoencoderKL.from_pretrained(tmp_path, device_map={"": "dtorch:0"}, torch_dtype=dtype)
        plain = AutoencoderKL.from_pretrained(tmp_path, torch_dtype=dtype)
        for name, want in plain.state_dict().items():
            assert equal(model.state_dict()[name], want)


def test_patches_can_be_undone(folder):
    from transformers import core_model_loading, modeling_utils

    mine = core_model_loading.spawn_materialize, modeling_utils.safe_open
    TRANSFORMERS_LOADING.revert()
    assert core_model_loading.spawn_materialize is not mine[0]
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(Exception, match="incomplete") as caught:
        LlamaForCausalLM.from_pretrained(folder)
    assert "model.safetensors" not in str(caught.value)  # the reason for the patch


def test_the_program_holds_no_weights(tmp_path):
    """Peak resident memory of a program that loads models of 300 MB: it grows by a fixed amount, whatever the size."""
    growth.write(tmp_path)
    done = subprocess.run(
        [sys.executable, growth.__file__, str(tmp_path)], check=True, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DTORCH_MODE": "local"},
    )  # fmt: skip
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(growth.WAYS), done.stdout
    for model, way, grown_mb, size_mb in lines:
        assert int(size_mb) > 250
        assert int(grown_mb) < 60, f"{model} {way}: the program grew by {grown_mb} MB for {size_mb} MB of weights"
