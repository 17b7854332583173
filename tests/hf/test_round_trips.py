"""Models into files and back, between plain torch and the mesh in every direction."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch

from .toys import on_mesh, prompt, same

IDS = prompt()["input_ids"]
BOTH = pytest.mark.parametrize("mesh", ["inline", "local"], indirect=True)


def fresh(seed: int = 0) -> Any:
    """A toy Llama whose input and output embedding are one parameter, as new."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> Any:
    return fresh()


@pytest.fixture
def want(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(IDS).logits
    return logits


def is_on_mesh(model: Any, want: torch.Tensor, index: int = 0) -> None:
    """Every parameter and buffer is on this mesh, tied weights are one, and the model gives these logits."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    assert devices == {torch.device("dtorch", index)}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    same(model(IDS.to(f"dtorch:{index}")).logits, want)


def is_plain(model: Any, want: torch.Tensor) -> None:
    """The model is on the CPU and gives these logits."""
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert torch.equal(model(IDS).logits, want)


# -- from_pretrained, save_pretrained ----------------------------------------------------------------------------------
DEVICE_MAPS: dict[str, Any] = {
    "name": "dtorch", "index": "dtorch:0", "device": torch.device("dtorch", 0), "number": {"": 0},
    "mapping": {"": "dtorch:0"},
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("device_map", DEVICE_MAPS)
def test_from_pretrained_with_device_map(
    device_map: str, model: Any, want: torch.Tensor, tmp_path: Path, mesh: Any
) -> None:
    model.save_pretrained(tmp_path)
    is_on_mesh(type(model).from_pretrained(tmp_path, device_map=DEVICE_MAPS[device_map]), want)


@BOTH
def test_from_pretrained_then_moved(model: Any, want: torch.Tensor, tmp_path: Path, mesh: Any) -> None:
    model.save_pretrained(tmp_path)
    there = type(model).from_pretrained(tmp_path).to("dtorch")
    is_on_mesh(there, want)
    is_plain(there.cpu(), want)


def test_from_pretrained_in_a_device_context(model: Any, want: torch.Tensor, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    with torch.device("dtorch"):
        is_on_mesh(type(model).from_pretrained(tmp_path), want)


def test_from_pretrained_in_another_dtype(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    there = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="dtorch")
    is_on_mesh(there, half(IDS).logits)


def test_split_over_two_meshes(model: Any, want: torch.Tensor, tmp_path: Path) -> None:
    """accelerate's hooks carry the activations from mesh to mesh."""
    with dtorch.DeviceMesh("cpu", [1]):
        other = torch.zeros(1, device="dtorch").device.index
    model.save_pretrained(tmp_path)
    device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": other, "model.norm": other,
                  "model.rotary_emb": 0, "lm_head": 0}  # fmt: skip
    there = type(model).from_pretrained(tmp_path, device_map=device_map)
    assert {p.device.index for p in there.parameters()} == {0, other}
    assert torch.equal(there(IDS.to("dtorch:0")).logits.to_torch(), want)


@BOTH
def test_save_pretrained(model: Any, want: torch.Tensor, tmp_path: Path, mesh: Any) -> None:
    on_mesh(model).save_pretrained(tmp_path / "there")
    model.save_pretrained(tmp_path / "here")
    is_plain(type(model).from_pretrained(tmp_path / "there"), want)
    sizes = [(tmp_path / place / "model.safetensors").stat().st_size for place in ("there", "here")]
    assert sizes[0] == sizes[1], "tied weights are saved once"


def test_save_pretrained_in_shards(model: Any, want: torch.Tensor, tmp_path: Path) -> None:
    on_mesh(model).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    is_plain(type(model).from_pretrained(tmp_path), want)
    is_on_mesh(type(model).from_pretrained(tmp_path, device_map="dtorch"), want)


@pytest.mark.parametrize("placement", [dtorch.Shard(0), dtorch.Shard(1)])
def test_what_one_layout_saved_another_loads(placement: Any, model: Any, want: torch.Tensor, tmp_path: Path) -> None:
    two = dtorch.DeviceMesh("cpu", [0, 1])
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            where = [placement] if p.dim() == 2 else [dtorch.Replicate()]
            setattr(module, name, torch.nn.Parameter(dtorch.distribute_tensor(p.detach(), two, where)))
    model.tie_weights()
    model.save_pretrained(tmp_path)
    is_on_mesh(type(model).from_pretrained(tmp_path, device_map="dtorch"), want)


# -- state_dict --------------------------------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool, model: Any, want: torch.Tensor, mesh: Any) -> None:
    there = on_mesh(model)
    for source in (model, there):
        other = fresh(1)
        other.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
        other.tie_weights()
        is_on_mesh(other.to("dtorch"), want)
        if not assign:  # an assigned parameter takes its place with it
            other = on_mesh(fresh(1))
            other.load_state_dict(source.state_dict())
            is_on_mesh(other, want)
    plain = fresh(1)
    plain.load_state_dict(there.state_dict())
    is_plain(plain, want)


def test_optimizer_state(model: Any, tmp_path: Path) -> None:
    def step(m: Any, optimizer: torch.optim.Optimizer) -> None:
        with torch.enable_grad():
            ids = IDS.to(m.device)
            m(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    there = on_mesh(model)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (model, there)]
    step(model, optimizers[0])
    step(there, optimizers[1])
    torch.save({"model": there.state_dict(), "optimizer": optimizers[1].state_dict()}, tmp_path / "state.pt")
    again = on_mesh(fresh(1))
    optimizer = torch.optim.AdamW(again.parameters())
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step(model, optimizers[0])
    step(again, optimizer)
    same([p.detach() for p in again.parameters()], [p.detach() for p in model.parameters()])


# -- torch.save, pickle, deepcopy --------------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_save_of_weights(weights_only: bool, model: Any, want: torch.Tensor, tmp_path: Path, mesh: Any) -> None:
    there = on_mesh(model)
    for source, location in ((there, None), (there, "dtorch:0"), (model, "dtorch:0"), (model, "dtorch")):
        torch.save(source.state_dict(), tmp_path / "weights.pt")
        state = torch.load(tmp_path / "weights.pt", map_location=location, weights_only=weights_only)
        assert {t.device.type for t in state.values()} == {"dtorch"}
        other = on_mesh(fresh(1))
        other.load_state_dict(state)
        is_on_mesh(other, want)
    torch.save(there.state_dict(), tmp_path / "weights.pt")
    plain = fresh(1)
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", map_location="cpu", weights_only=weights_only))
    is_plain(plain, want)


def by_torch(there: Any, path: Path) -> Any:
    torch.save(there, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=False)


def by_pickle(there: Any, path: Path) -> Any:
    return pickle.loads(pickle.dumps(there))


def by_deepcopy(there: Any, path: Path) -> Any:
    return copy.deepcopy(there)


@pytest.mark.parametrize("again", [by_torch, by_pickle, by_deepcopy])
def test_whole_models(again: Callable[[Any, Path], Any], model: Any, want: torch.Tensor, tmp_path: Path) -> None:
    is_on_mesh(again(on_mesh(model), tmp_path), want)


# -- safetensors -------------------------------------------------------------------------------------------------------
@BOTH
def test_safetensors_of_models(model: Any, want: torch.Tensor, tmp_path: Path, mesh: Any) -> None:
    from safetensors.torch import load_model, save_model

    there = on_mesh(model)
    for source in (model, there):
        save_model(source, str(tmp_path / "model.safetensors"))
        plain, other = fresh(1), on_mesh(fresh(1))
        for m in (plain, other):
            missing, unexpected = load_model(m, tmp_path / "model.safetensors")
            assert not missing
            assert not unexpected
        is_plain(plain, want)
        is_on_mesh(other, want)


@BOTH
def test_safetensors_of_tensors(model: Any, tmp_path: Path, mesh: Any) -> None:
    from safetensors.torch import load, load_file, save, save_file

    tensors = {name: p.detach() for name, p in model.named_parameters()}
    there = {name: t.to("dtorch") for name, t in tensors.items()}
    save_file(there, tmp_path / "tensors.safetensors", metadata={"format": "pt"})
    for loaded in (load_file(tmp_path / "tensors.safetensors"), load(save(there))):
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_safetensors_refuses_views_of_one_memory(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = torch.arange(8.0).to("dtorch")
    with pytest.raises(RuntimeError, match="share memory"):
        save_file({"a": base, "b": base[2:4]}, tmp_path / "tensors.safetensors")


# -- building and converting -------------------------------------------------------------------------------------------
def test_converting_on_the_mesh(model: Any) -> None:
    there = on_mesh(model).to(torch.bfloat16)
    assert {p.dtype for p in there.parameters()} == {torch.bfloat16}
    same(there(IDS.to("dtorch")).logits, model.to(torch.bfloat16)(IDS).logits)
    same(there.float()(IDS.to("dtorch")).logits, model.float()(IDS).logits)


def test_building_on_the_mesh_draws_the_same_weights(model: Any, want: torch.Tensor) -> None:
    with torch.device("dtorch"):
        there = fresh()
    is_on_mesh(there, want)


def test_filling_a_model_built_on_meta(model: Any, want: torch.Tensor) -> None:
    with torch.device("meta"):
        empty = fresh()
    there = empty.to_empty(device="dtorch")
    there.load_state_dict(model.state_dict())
    there.model.rotary_emb = copy.deepcopy(model.model.rotary_emb).to("dtorch")  # its buffers are not in the state
    there.tie_weights()
    is_on_mesh(there, want)
