"""Training that goes on from a checkpoint has the bits of training that was never interrupted, in the same layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dtorch
from dtorch import Shard
from dtorch.client.weights import read_headers
from tests.engine.helpers import both_modes, full, mesh

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {}, "one device": {"layout": {"dp": 1}}, "dp=2": {"layout": {"dp": 2}}, "tp=2": {"layout": {"tp": 2}},
    "zero=3": {"layout": {"dp": 2}, "zero": 3}, "zero=3, tp=2": {"layout": {"dp": 2, "tp": 2}, "zero": 3},
}  # fmt: skip


def values(training: Any) -> list[torch.Tensor]:
    """Weights, buffers and the optimizer's states."""
    states = [v for p in training.model.parameters() for v in training.optimizer.state[p].values()]
    return [full(t) for t in (*training.model.state_dict().values(), *states)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@both_modes
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("layout", ["plain", "dp=2", "zero=3, tp=2"])
def test_resumes_with_the_same_bits(mode: str, training: Callable[..., Any], layout: str, steps: int, tmp_path: Path) -> None:
    one = training(**LAYOUTS[layout])
    one.run(steps)
    dtorch.save(one.state, tmp_path / "a")
    want = one.run(3), values(one)  # while it is written
    other = training(**LAYOUTS[layout])
    other.run(1)  # which leaves other numbers everywhere
    dtorch.load(tmp_path / "a", into=other.state)
    assert (other.run(3), True) == (want[0], same(values(other), want[1]))


@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}, {"lr": torch.tensor(1e-2)}], ids=str)
def test_states_of_other_forms(training: Callable[..., Any], options: dict[str, Any], tmp_path: Path) -> None:
    make = lambda: training(layout={"dp": 2}, zero=3)
    one, other = make(), make()
    for each in (one, other):
        each.optimizer = each.state["optimizer"] = torch.optim.AdamW(each.model.parameters(), **{"lr": 1e-2, **options})
        each.schedule = each.state["schedule"] = torch.optim.lr_scheduler.StepLR(each.optimizer, 2)
    one.run(2)
    dtorch.save(one.state, tmp_path / "a")
    want = one.run(2)
    dtorch.load(tmp_path / "a", into=other.state)
    assert other.run(2) == want


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
def test_any_layout_reads_any_other(training: Callable[..., Any], format: str, tmp_path: Path) -> None:
    last = training(**LAYOUTS["dp=2"])
    last.run(2)
    want = values(last)
    for number, layout in enumerate(("tp=2", "one device", "zero=3, tp=2", "plain", "zero=3")):
        dtorch.save(last.state, tmp_path / str(number), format=format, blocking=True)
        last = training(**LAYOUTS[layout])
        dtorch.load(tmp_path / str(number), into=last.state)
        assert same(values(last), want), layout
        for p in last.model.parameters():
            state = last.optimizer.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                assert getattr(state[name], "placements", None) == getattr(p, "placements", None)
            assert type(state["step"]) is torch.Tensor


def test_new_tensors_are_placed_as_they_were(training: Callable[..., Any], tmp_path: Path) -> None:
    one = training(**LAYOUTS["zero=3"])
    one.run(1)
    dtorch.save(one.state, tmp_path / "a", blocking=True)
    same_shape = dtorch.load(tmp_path / "a", device_mesh=mesh(2, names=("x",)))
    assert same_shape["model"]["0.weight"].placements == (Shard(0),)
    assert same_shape["optimizer"]["state"][0]["exp_avg"].placements == (Shard(0),)
    wider = dtorch.load(tmp_path / "a", device_mesh=mesh(2, 2))
    assert all(not p.is_shard() for p in wider["model"]["0.weight"].placements)


def test_weights_are_ordinary_files(training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch.client.checkpoint.layout.MOST_BYTES", 600)
    one = training(**LAYOUTS["zero=3, tp=2"])
    dtorch.save({"models": [one.model]}, tmp_path / "a", blocking=True)
    folder = tmp_path / "a" / "models" / "0"
    files = sorted(folder.glob("model-0000*-of-0000*.safetensors"))
    assert len(files) == 2 and (folder / "model.safetensors.index.json").exists()
    found = {name: t for file in files for name, t in load_file(file).items()}
    want = one.model.state_dict()
    assert found.keys() == want.keys() and all(torch.equal(found[k], full(v)) for k, v in want.items())
    assert read_headers(folder).keys() == want.keys()


def test_from_pretrained_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    plain, ids = transformers.LlamaForCausalLM(config).eval(), torch.arange(12).view(2, 6)
    with torch.no_grad():
        want = plain(ids).logits
    model = dtorch.parallelize(plain, mesh(2, 2, names=("dp", "tp")), zero=3)
    dtorch.save({"model": model, "step": 1}, tmp_path / "a", blocking=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, want)
    other = dtorch.parallelize(transformers.LlamaForCausalLM(config), mesh(2, names=("tp",)))
    dtorch.load(tmp_path / "a", into={"model": other})
    assert all(torch.equal(full(a), full(b)) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_reads_and_writes_the_other_format(training: Callable[..., Any], tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    one = training(**LAYOUTS["zero=3"])
    one.run(1)
    dtorch.save({"model": one.model, "step": 5}, tmp_path / "ours", format="dcp", blocking=True)
    read = {"model": {k: torch.zeros_like(full(v)) for k, v in one.model.state_dict().items()}, "step": 0}
    dcp.load(read, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert read["step"] == 5 and all(torch.equal(read["model"][k], full(v)) for k, v in one.model.state_dict().items())

    plain = training()
    plain.run(2)
    state = {"model": plain.model.state_dict(), "optimizer": plain.optimizer.state_dict(), "list": [torch.ones(2), 3]}
    writer = dcp.FileSystemWriter(tmp_path / "theirs", per_thread_copy_ahead=0)  # from devices, of which it takes us for one
    dcp.save(state, storage_writer=writer, no_dist=True)
    into = training(**LAYOUTS["zero=3"])
    dtorch.load(tmp_path / "theirs", into={"model": into.model, "optimizer": into.optimizer})
    assert same(values(into), values(plain))
    assert dtorch.load(tmp_path / "theirs")["list"][1] == 3
