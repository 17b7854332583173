"""Attention heads that do not divide by ``tp``: plain torch's values, no more communication than where they divide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import dtorch

IDS = torch.randint(3, 90, (2, 6), generator=torch.Generator().manual_seed(1))
SIZE = 8  # features of a head


def model(heads: int, kept: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=heads * SIZE, intermediate_size=48, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kept, vocab_size=96,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def placed(plain: Any, layout: dict[str, int], plan: Any = "auto") -> Any:
    mesh = dtorch.init_device_mesh("cpu", tuple(layout.values()), mesh_dim_names=tuple(layout))
    return dtorch.parallelize(copy.deepcopy(plain), mesh, plan)


def held(weight: Any) -> list[int]:
    """Heads in each device's piece of a weight cut by rows."""
    return [weight._h.spec.local_shape(position)[0] // SIZE for position in range(weight.device_mesh.size())]


def check(plain: Any, parallel: Any) -> None:
    """Logits and gradients."""
    plain.zero_grad()
    want, got = plain(IDS, use_cache=False).logits, parallel(IDS, use_cache=False).logits
    torch.testing.assert_close(got.to_torch(), want.detach(), rtol=1e-4, atol=1e-4)
    want.pow(2).mean().backward()
    got.pow(2).mean().backward()
    for mine, theirs in zip(parallel.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kept", "tp", "pieces"),
    [
        (6, 6, 4, [2, 2, 2, 0]), (6, 2, 4, [2, 2, 2, 0]), (6, 1, 4, [2, 2, 2, 0]), (5, 5, 3, [2, 2, 1]), (6, 2, 3, [2, 2, 2]),
        (6, 1, 3, [2, 2, 2]), (9, 3, 2, [5, 4]),
    ],
)  # fmt: skip
def test_whole_heads(heads: int, kept: int, tp: int, pieces: list[int]) -> None:
    plain = model(heads, kept)
    parallel = placed(plain, {"tp": tp})
    attention = parallel.model.layers[0].self_attn
    assert held(attention.q_proj.weight) == pieces
    shared = pieces if kept == heads else [kept // tp] * tp if kept % tp == 0 else [kept] * tp
    assert held(attention.k_proj.weight) == held(attention.v_proj.weight) == shared
    with torch.no_grad():
        report = dtorch.explain(parallel, IDS, use_cache=False, quiet=True)
    assert report.collectives == {"all_reduce": 3}  # as where heads divide: the embedding, and two a layer
    check(plain, parallel)


@pytest.mark.parametrize(
    ("layout", "kept"), [({"tp": 4, "ulysses_cp": 2}, 5), ({"ulysses_cp": 2, "tp": 4}, 1), ({"tp": 3, "ring_cp": 2}, 5),
                         ({"tp": 2, "tp_outer": 2}, 5)], ids=str,
)  # fmt: skip
def test_with_other_axes(layout: dict[str, int], kept: int) -> None:
    plain = model(5, kept)
    check(plain, placed(plain, layout))


def test_generation() -> None:
    plain = model(6, 2)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}
    want = plain.generate(IDS, **options)
    assert torch.equal(placed(plain, {"tp": 4}).generate(IDS.to("dtorch"), **options).to_torch(), want)


def test_output_layers_beside_the_attention() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3, vocab_size=96
    )
    plain = transformers.BertModel(config, add_pooling_layer=False).eval()
    parallel = placed(plain, {"tp": 2})
    with torch.no_grad():
        report = dtorch.explain(parallel, IDS, quiet=True)
        want = plain(IDS).last_hidden_state
    torch.testing.assert_close(report.result.last_hidden_state.to_torch(), want, rtol=1e-4, atol=1e-5)
    assert set(report.collectives) == {"all_reduce"}


def test_cuts_through_heads_are_mended_by_exchanges_between_neighbours() -> None:
    """Where a plan says nothing of heads, they are cut all the same for the attention: what is missing is fetched."""
    plain = model(6, 6)
    styles = {"model.layers.*.self_attn.[qkv]_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    plan = {name.replace("[qkv]", kind): style for name, style in styles.items() for kind in "qkv"}
    parallel = placed(plain, {"tp": 4}, plan)
    with torch.no_grad():
        report = dtorch.explain(parallel, IDS, use_cache=False, quiet=True)
    assert report.collectives == {"all_reduce": 1, "move": 4}
    assert held(parallel.model.layers[0].self_attn.q_proj.weight) == [1, 1, 1, 1]  # and a half
    check(plain, parallel)


@pytest.mark.parametrize(("heads", "kept", "tp", "note"), [
    (8, 4, 4, ""),
    (6, 6, 4, "model.layers.0.self_attn: 6 heads for tp=4: at most 2 on a device."),
    (6, 2, 3, "model.layers.0.self_attn: 2 key and value heads for tp=3: all on every device."),
    (2, 2, 4, "2 heads for tp=4: they are gathered, and every device computes attention with all of them."),
    (6, 3, 6, "3 key and value heads for tp=6: all on every device, gathered."),
])  # fmt: skip
def test_the_user_is_told(heads: int, kept: int, tp: int, note: str) -> None:
    plain = model(heads, kept)
    found = dtorch.describe(placed(plain, {"tp": tp}))
    assert bool(found.notes) == bool(note)
    assert note in str(found)
    assert dtorch.forecast(plain, {"tp": tp}, 2, 6).parameters.notes == found.notes
    if heads < tp or "gathered" in note:
        check(plain, placed(plain, {"tp": tp}))


@pytest.mark.parametrize(("shape", "folded"), [((5, 4), (20,)), ((3, 5, 2), (3, 10)), ((6, 2, 3), (36,)), ((6, 4), (3, 8))])
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 3), (3, 2)])
def test_reshapes_of_uneven_pieces(shape: tuple[int, ...], folded: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    mesh = dtorch.init_device_mesh("cpu", sizes)
    plain = torch.randn(shape)
    dim = len(folded) - 1 if len(folded) == len(shape) - 1 else 0
    x = dtorch.distribute_tensor(plain, mesh, [dtorch.Shard(dim)] * len(sizes))
    report = dtorch.explain(lambda: x.view(folded).view(shape) * 2, quiet=True)
    assert torch.equal(report.result.to_torch(), plain * 2)
    if folded != (3, 8):
        assert not report.collectives


def test_units_are_kept() -> None:
    p = dtorch.Shard(1, unit=4)
    assert p != dtorch.Shard(1)
    assert repr(p) == "Shard(dim=1, unit=4)"
    mesh = dtorch.init_device_mesh("cpu", (2,))
    plain = torch.randn(3, 12)
    x = dtorch.distribute_tensor(plain, mesh, [dtorch.Shard(-1, unit=4)])
    assert [x._h.spec.local_shape(i) for i in range(2)] == [(3, 8), (3, 4)]
    y = (x + 1).t().contiguous()
    assert list(y.placements) == [dtorch.Shard(0, unit=4)]
    assert torch.equal(y.to_torch(), (plain + 1).t())
    for to in (dtorch.Shard(1), dtorch.Shard(0), dtorch.Replicate()):
        assert torch.equal(x.redistribute(placements=[to]).to_torch(), plain)
    with pytest.raises(dtorch.PlacementError, match="at least 1"):
        dtorch.Shard(0, unit=0)
