"""Dimensions cut in segments: cat and its inverses along a cut dimension move nothing, values are torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import Replicate, Shard
from dtorch.core.errors import PlacementError
from tests.rules.sweep import placements_of, spread, sweep, value_of


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _there_and_back(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    joined = torch.cat([a, b], 1)
    changed = joined.relu() * 2 + joined
    first, second = changed.split([a.shape[1], b.shape[1]], 1)
    return [joined, first, second, changed[:, : a.shape[1]], changed[:, a.shape[1] :], changed.mean(1), changed.sum()]


def _gradients(run: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    def both(*values: torch.Tensor) -> list[torch.Tensor]:
        given = [v.detach().requires_grad_() for v in values]
        total = sum(x.sin().sum() for x in run(*given))
        assert isinstance(total, torch.Tensor)
        return list(torch.autograd.grad(total, given))

    return both


@pytest.mark.parametrize("run", [_there_and_back, _gradients(_there_and_back)], ids=["values", "gradients"])
def test_values(run: Callable[..., Any]) -> None:
    sweep(run, _x(2, 8, 3), _x(2, 5, 3), exact=False)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_nothing_moves(mesh: tuple[int, ...]) -> None:
    on = dtorch.init_device_mesh("cpu", mesh)
    where = [Shard(1)] * len(mesh)
    a, b = spread(_x(2, 8, 4), on, where), spread(_x(2, 5, 4), on, where)
    weight = spread(_x(4, 4), on, [Replicate()] * len(mesh))

    def run() -> list[torch.Tensor]:
        joined = torch.nn.functional.linear(torch.cat([a, b], 1), weight)
        three = torch.cat([joined, a], 1)
        return [joined, three, *three.split([8, 5, 8], 1), three[:, 8:13], three[:, 8:]]

    with dtorch.strict():
        results = run()
    lengths: list[tuple[int, ...]] = [(8, 5), (8, 5, 8), (), (), (), (), (5, 8)]
    for x, segments in zip(results, lengths, strict=True):
        assert placements_of(x) == [Shard(1, segments)] * len(mesh)


def test_parts_that_were_not_joined_are_exchanged_not_gathered() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    x = spread(_x(2, 8), mesh, [Shard(1)])
    assert dtorch.explain(lambda: x.chunk(2, 1)).collectives == {"all_to_all": 1}
    assert [placements_of(part) for part in x.chunk(2, 1)] == [[Shard(1)]] * 2


def test_a_view_of_a_segment_is_a_view() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    a, b = torch.zeros(4), torch.zeros(6)
    joined = torch.cat([spread(a, mesh, [Shard(0)]), spread(b, mesh, [Shard(0)])])
    joined[4:].add_(1)
    first, second = joined.split([4, 6])
    first.sub_(2)
    second[:].mul_(3)
    assert placements_of(second) == [Shard(0)]
    assert torch.equal(value_of(joined), torch.tensor([-2.0] * 4 + [3.0] * 6))


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_stretches(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(2,), (3,), (2, 2)]))
    mesh = dtorch.init_device_mesh("cpu", shape)
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    parts, spreads = [], []
    for n in lengths:
        parts.append(_x(n + 1, 2)[:n])
        cut = data.draw(st.integers(0, n))
        kinds = [Replicate(), Shard(0), Shard(0, (cut, n - cut)), Shard(0, (cut, cut - n)), Shard(1)]
        spreads.append(spread(parts[-1], mesh, [data.draw(st.sampled_from(kinds)) for _ in shape]))
    want, got = torch.cat(parts), torch.cat(spreads)
    assert torch.equal(value_of(got), want)
    start = data.draw(st.integers(0, len(want)))
    stop = data.draw(st.integers(start, len(want)))
    assert torch.equal(value_of(got[start:stop] * 2), want[start:stop] * 2)
    sizes = [start, stop - start, len(want) - stop]
    for x, y in zip(got.split(sizes), want.split(sizes), strict=True):
        assert torch.equal(value_of(x), y)


def test_segments_must_fit() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,))
    with pytest.raises(PlacementError, match=r"must add up to the size of the dimension, 5"):
        dtorch.Tensor(torch.zeros(5), device_mesh=mesh, placements=[Shard(0, (2, 2))])


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("segments", [(), (4, -3)])
def test_folded_dimensions_stay_cut(mesh: tuple[int, ...], segments: tuple[int, ...]) -> None:
    on = dtorch.init_device_mesh("cpu", mesh)
    where = [Shard(1, segments)] * len(mesh)
    x = spread(_x(3, 7, 5), on, where)
    with dtorch.strict():
        flat = x.view(21, 5).relu()
        back = flat.view(3, 7, 5)
    assert placements_of(flat) == [Shard(0, (segments or (7,)) * 3)] * len(mesh)
    assert placements_of(back) == where
    assert torch.equal(value_of(flat), _x(3, 7, 5).view(21, 5).relu())
    assert torch.equal(value_of(back), _x(3, 7, 5).relu())


@pytest.mark.parametrize("placements", [[Shard(1)], [Shard(1, (4, -4))], [Shard(0), Shard(1)]])
def test_loss_over_cut_sequences_gathers_no_logits(placements: list[Any]) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2,) * len(placements))
    logits, labels = _x(2, 8, 6), torch.randint(0, 6, (2, 8), generator=torch.Generator().manual_seed(0))
    labels[:, -2:] = -100
    plain = logits.clone().requires_grad_()
    want = torch.nn.functional.cross_entropy(plain.view(-1, 6), labels.view(-1))
    want.backward()
    mine = spread(logits, mesh, placements).requires_grad_()
    spread_labels = dtorch.Tensor(labels, device_mesh=mesh)
    with dtorch.strict():
        got = torch.nn.functional.cross_entropy(mine.view(-1, 6), spread_labels.view(-1))
    got.backward()
    torch.testing.assert_close(value_of(got.detach()), want.detach())
    assert mine.grad is not None and plain.grad is not None
    assert placements_of(mine.grad) == placements
    torch.testing.assert_close(value_of(mine.grad), plain.grad)
