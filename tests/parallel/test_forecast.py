"""Planning without running: what is foretold is what happens; suggestions are ranked, and say why."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import dtorch
from dtorch.client import graph
from dtorch.parallel.links import KINDS, Link, Links, measure
from dtorch.parallel.suggest import suggest

BATCH, SEQUENCE = 4, 16


def model(device: str = "cpu") -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=160
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).eval()


LAYOUTS = [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"ulysses_cp": 2}, {"ring_cp": 4}, {"dp": 2, "pp": 4}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_is_planned_is_what_happens(layout: dict[str, int]) -> None:
    plain = model()
    planned = dtorch.forecast(plain, layout, BATCH, SEQUENCE)
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    parallel = dtorch.parallelize(copy.deepcopy(plain), mesh)
    with torch.no_grad():
        report = dtorch.explain(parallel, torch.zeros(BATCH, SEQUENCE, dtype=torch.int64), use_cache=False, quiet=True)
    assert planned.total.collectives == report.collectives
    assert planned.total.bytes == report.bytes
    assert planned.parameters.bytes_by_device == dtorch.describe(parallel).bytes_by_device
    assert [name for name in planned.layers if name] == [f"model.layers.{i}" for i in range(4)]
    assert all(p.device.type == "cpu" for p in plain.parameters())  # it stays as it is


def test_products_are_counted() -> None:
    one = dtorch.forecast(model("meta"), {"dp": 1}, BATCH, SEQUENCE)
    tokens, c = BATCH * SEQUENCE, model("meta").config
    kept = c.num_key_value_heads * (c.hidden_size // c.num_attention_heads)
    layer = 2 * tokens * c.hidden_size * (2 * c.hidden_size + 2 * kept + 3 * c.intermediate_size)
    attention = 4 * tokens * SEQUENCE * c.hidden_size
    head = 2 * tokens * c.hidden_size * c.vocab_size
    assert one.total.flops == pytest.approx(4 * (layer + attention) + head, rel=0.01)
    assert one.total.collectives == {}
    halved = dtorch.forecast(model("meta"), {"tp": 2}, BATCH, SEQUENCE)
    assert halved.total.flops == pytest.approx(one.total.flops / 2, rel=0.01)


def test_nothing_is_run_and_nothing_can_be_read() -> None:
    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(160))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.weight[ids] * 2
            return x if x.sum().item() > 0 else -x

    before = graph.sessions()
    with pytest.raises(dtorch.DtorchError, match="only planned"):
        dtorch.forecast(Reads(), {"dp": 2}, BATCH, SEQUENCE)
    assert graph.sessions() == before


def test_a_layout_that_cannot_work_says_why() -> None:
    with pytest.raises(dtorch.PlacementError, match="4 layers cannot fill 8 pipeline stages"):
        dtorch.forecast(model("meta"), {"pp": 8}, BATCH, SEQUENCE)
    with pytest.raises(dtorch.PlacementError, match="'rows'"):
        dtorch.forecast(model("meta"), {"rows": 2}, BATCH, SEQUENCE)


def links(latency_s: float, bytes_per_s: float) -> Links:
    return Links(kinds=dict.fromkeys(KINDS, Link(latency_s, bytes_per_s)))


def test_suggestions() -> None:
    found = suggest(model("meta"), 4, 8, 32, links=links(1e-3, 1e9))
    assert found[0].layout == {"dp": 4}  # as nothing is communicated
    assert found[0].reason == "no communication"
    assert [s.forecast.seconds for s in found] == sorted(s.forecast.seconds for s in found)
    single = suggest(model("meta"), 2, 1, 8, links=links(1e-9, 1e15))
    assert all("dp" not in s.layout for s in single)  # one row cannot be cut
    limit = dtorch.forecast(model("meta"), {"tp": 2}, 8, 32).bytes_per_device
    tight = suggest(model("meta"), 2, 8, 32, limit, links=links(1e-3, 1e9))
    assert tight[0].fits
    assert not tight[-1].fits
    assert f"of {limit:,} bytes" in tight[-1].reason


def test_best_plan() -> None:
    plain = model()
    mesh = dtorch.init_device_mesh("cpu", (4,))
    parallel = dtorch.parallelize(copy.deepcopy(plain), mesh, plan="best", workload=(8, SEQUENCE))
    used = {d for p in parallel.parameters() for d in p.device_mesh.devices}
    assert used == {0, 1, 2, 3}
    ids = torch.randint(0, 160, (8, SEQUENCE), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(parallel(ids).logits.to_torch(), plain(ids).logits, rtol=1e-4, atol=1e-4)


def test_links_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "links.json"
    assert Links.load(path) == Links()
    found = measure(2)
    assert set(found.kinds) == set(KINDS)
    assert min(found.flops_per_s, found.memory_bytes_per_s, *(link.bytes_per_s for link in found.kinds.values())) > 0
    found.save(path)
    assert Links.load(path) == found
    path.write_text("[]")
    with pytest.raises(dtorch.DtorchError, match="bench-links"):
        Links.load(path)
    with pytest.raises(dtorch.DtorchError, match="at least 2"):
        measure(1)
