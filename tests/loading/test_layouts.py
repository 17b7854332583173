"""Checkpoints do not know layouts: what was written under one is read under any other, complete and bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from transformers import LlamaConfig, LlamaForCausalLM

import dtorch
from tests.engine.conftest import start
from tests.engine.helpers import both_modes, mesh
from tests.loading.conftest import equal

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, int]]] = {
    "tp2": ((2,), ("tp",), {}),
    "zero3": ((2,), ("dp",), {"zero": 3}),
    "pp2": ((2,), ("pp",), {}),
    "pp2 tp2": ((2, 2), ("pp", "tp"), {}),
}
NAMES = ["plain", "one", *LAYOUTS]


def placed(layout: str, model: Any) -> Any:
    """The model under a layout."""
    if layout == "plain":
        return model
    if layout == "one":
        return dtorch.parallelize(model, dtorch.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    shape, axes, options = LAYOUTS[layout]
    return dtorch.parallelize(model, dtorch.init_device_mesh("cpu", shape, mesh_dim_names=axes), **options)


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(config: LlamaConfig) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def other(config: LlamaConfig) -> Any:
    torch.manual_seed(1)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def written(source: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model saved in every way under every layout."""
    folder = tmp_path_factory.mktemp("layouts")
    start("inline")
    for layout in NAMES:
        model = placed(layout, copy.deepcopy(source))
        here = folder / layout
        model.save_pretrained(here)
        save_file(model.state_dict(), here / "state.safetensors")
        save_model(model, str(here / "whole.safetensors"))
        torch.save(model.state_dict(), here / "state.pt")
    return folder


def check(model: Any, source: Any) -> None:
    state = model.state_dict()
    assert list(state) == list(source.state_dict())
    for name, want in source.state_dict().items():
        assert equal(state[name], want), name


def where(model: Any) -> list[Any]:
    return [(p.device, getattr(p, "placements", None)) for p in model.parameters()]


@pytest.mark.parametrize("writer", NAMES)
def test_files_are_complete(written, source, writer):
    for name in ("model.safetensors", "state.safetensors", "whole.safetensors"):
        plain = load_file(written / writer / name)
        assert set(plain) == set(source.state_dict())
        for key, want in source.state_dict().items():
            assert equal(plain[key], want)
    state = torch.load(written / writer / "state.pt", map_location="cpu")
    assert all(not isinstance(v, dtorch.DTensor) and equal(v, source.state_dict()[k]) for k, v in state.items())


@pytest.mark.parametrize("reader", NAMES)
def test_read_under_another_layout(written, source, other, reader):
    for writer in NAMES:
        here = written / writer
        check(placed(reader, LlamaForCausalLM.from_pretrained(here)), source)
        model = placed(reader, copy.deepcopy(other))
        before = where(model)
        for state in (
            load_file(here / "state.safetensors"), torch.load(here / "state.pt"),
            torch.load(here / "state.pt", map_location="cpu"), torch.load(here / "state.pt", map_location="dtorch:0"),
        ):  # fmt: skip
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.load_state_dict(state)
            check(model, source)
        load_model(model, str(here / "whole.safetensors"))
        check(model, source)
        assert where(model) == before


@both_modes
def test_the_model_computes_the_same(mode, written, source):
    tokens = torch.randint(0, 101, (2, 7))
    want = source(tokens).logits
    for reader in ("tp2", "zero3", "pp2"):
        model = placed(reader, LlamaForCausalLM.from_pretrained(written / "pp2 tp2"))
        got = model(tokens).logits.to_torch()
        torch.testing.assert_close(got, want)


def test_tied_weights_stay_tied(tmp_path, config):
    tied = copy.deepcopy(config)
    tied.tie_word_embeddings = True
    source = LlamaForCausalLM(tied).eval()
    model = placed("tp2", copy.deepcopy(source))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for load in (
        lambda: placed("pp2", LlamaForCausalLM.from_pretrained(tmp_path)),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path).to("dtorch"),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path, device_map="dtorch:0"),
    ):
        again = load()
        assert again.lm_head.weight is again.model.embed_tokens.weight
        check(again, source)


def test_saved_over_its_own_files(tmp_path, source):
    """Train, and save to where it was loaded from."""
    source.save_pretrained(tmp_path)
    mesh(1)
    model = placed("tp2", LlamaForCausalLM.from_pretrained(tmp_path))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    for name, want in source.state_dict().items():
        assert equal(again.state_dict()[name], want * 2)
        assert equal(model.state_dict()[name], want * 2)
