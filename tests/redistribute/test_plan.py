"""Which steps a redistribution takes and how many bytes they move: the textbook's numbers."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from dtorch.core.errors import PlacementError
from dtorch.core.placements import REPLICATE, Partial, Placement, Shard
from dtorch.planner.redistribute import LATENCY_BYTES, cost, plan_steps, step_bytes
from tests.redistribute.cases import make_spec, mesh_of, placements_of

R, P = REPLICATE, Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
LINE = mesh_of(0, (4,))
SQUARE = mesh_of(1, (2, 2))
OTHER = mesh_of(2, (2,), [4, 5])
SAME_DEVICES = mesh_of(3, (4,))
OVERLAPPING = mesh_of(4, (2,), [3, 4])
BIG = (1024, 1024)
V = 4 * 1024 * 1024

ONE_AXIS = [
    (S0, R, "all_gather", 3 * V),
    (P, R, "all_reduce", 6 * V),
    (Partial("max"), R, "all_reduce", 6 * V),
    (P, S1, "reduce_scatter", 3 * V),
    (S0, S1, "all_to_all", 3 * V // 4),
    (R, S0, "slice", 0),
    (R, P, "mask", 0),
    (R, Partial("max"), "mask", 0),
    (S0, P, "mask", 0),
    (S0, Partial("product"), "mask", 0),
    (P, Partial("max"), "all_reduce mask", 6 * V),
    (S0, Partial("avg"), "all_gather mask", 3 * V),
]

TWO_AXES = [
    # One axis changes; the groups of the other hold copies, terms or different shards.
    ((S0, R), (R, R), "all_gather:0", 2 * V),
    ((S0, S1), (R, S1), "all_gather:0", V),
    ((P, S0), (R, S0), "all_reduce:0", 2 * V),
    ((P, S0), (S1, S0), "reduce_scatter:0", V),
    ((P, P), (P, S0), "reduce_scatter:1", 2 * V),
    # Both change: nested shards come apart from the inside, and are made from the outside.
    ((S0, S1), (R, R), "all_gather:0 all_gather:1", 3 * V),
    ((S0, S0), (R, R), "all_gather:1 all_gather:0", 3 * V),
    ((R, R), (S0, S0), "slice:0 slice:1", 0),
    ((S0, S0), (S0, S1), "all_to_all:1", V // 2),
    # An inner axis cuts the same dimension: only boxes one by one are right.
    ((S0, S0), (R, S0), "move:-1", 3 * V // 2),
    ((R, S0), (S0, S0), "move:-1", V // 2),
    # The fewest bytes: a permutation rather than a gather; a scatter before what follows.
    ((R, S0), (S0, R), "move:-1", V),
    ((S0, S1), (S1, S0), "move:-1", V // 2),
    ((P, P), (R, R), "reduce_scatter:0 all_reduce:1 all_gather:0", 6 * V),
    ((P, S0), (S0, S1), "reduce_scatter:0 move:-1", 3 * V // 2),
    ((P, S0), (S0, R), "reduce_scatter:0 move:-1", 5 * V // 2),
    # Different reductions: the inner one comes first.
    ((Partial("max"), P), (R, R), "reduce_scatter:1 all_reduce:0 all_gather:1", 6 * V),
]


@pytest.mark.parametrize(("before", "after", "kinds", "nbytes"), ONE_AXIS)
def test_one_axis(before: Placement, after: Placement, kinds: str, nbytes: int) -> None:
    src, dst = make_spec(LINE, [before], BIG), make_spec(LINE, [after], BIG)
    steps = plan_steps(src, dst)
    assert " ".join(s.kind for s in steps) == kinds
    assert [s.axis for s in steps] == [0] * len(steps)
    assert sum(map(step_bytes, steps)) == nbytes
    assert (steps[0].src, steps[-1].dst) == (src, dst)


@pytest.mark.parametrize(("before", "after", "kinds", "nbytes"), TWO_AXES)
def test_two_axes(before: tuple[Placement, ...], after: tuple[Placement, ...], kinds: str, nbytes: int) -> None:
    src, dst = make_spec(SQUARE, before, BIG), make_spec(SQUARE, after, BIG)
    steps = plan_steps(src, dst)
    assert " ".join(f"{s.kind}:{s.axis}" for s in steps) == kinds
    assert sum(map(step_bytes, steps)) == nbytes
    assert all(a.dst == b.src for a, b in itertools.pairwise(steps))


def test_small_tensors_take_few_steps_rather_than_few_bytes() -> None:
    kinds = [s.kind for s in plan_steps(make_spec(SQUARE, [P, P], (4, 4)), make_spec(SQUARE, [R, R], (4, 4)))]
    assert kinds == ["all_reduce", "all_reduce"]


@pytest.mark.parametrize(
    ("mesh", "before", "after", "kinds", "nbytes"),
    [
        (OTHER, (S0, R), (S0,), "move", V),
        (OTHER, (R, R), (R,), "move", 2 * V),
        (OTHER, (P, R), (S0,), "reduce_scatter move", 3 * V),
        (OTHER, (S0, R), (P,), "move mask", 2 * V),
        (SAME_DEVICES, (S0, S0), (S0,), "move", 0),
        (SAME_DEVICES, (S0, S1), (S0,), "move", V // 2),
        (OVERLAPPING, (R, R), (R,), "move", V),
    ],
)
def test_another_mesh(mesh, before, after, kinds: str, nbytes: int) -> None:  # type: ignore[no-untyped-def]
    steps = plan_steps(make_spec(SQUARE, before, BIG), make_spec(mesh, after, BIG))
    assert " ".join(s.kind for s in steps) == kinds
    assert sum(map(step_bytes, steps)) == nbytes


def test_nothing_to_do() -> None:
    spec = make_spec(SQUARE, [S0, P], (4, 6))
    assert plan_steps(spec, spec) == ()
    assert cost(spec, spec) == 0.0
    assert plan_steps(spec, spec.replace(stride=(12, 2))) == ()  # local tensors have no gaps either way


def test_other_strides_alone_are_a_local_copy() -> None:
    a, b = make_spec(SQUARE, [S0, P], (4, 6)), make_spec(SQUARE, [S0, P], (4, 6), order=(1, 0))
    (step,) = plan_steps(a, b)
    assert (step.kind, step_bytes(step)) == ("slice", 0)


def test_what_cannot_work_is_refused() -> None:
    spec = make_spec(LINE, [R], (4,))
    with pytest.raises(PlacementError, match=r"keeps shape and dtype, but \(4,\) float32 .* was to become \(5,\)"):
        plan_steps(spec, make_spec(LINE, [R], (5,)))
    with pytest.raises(PlacementError, match="keeps shape and dtype"):
        plan_steps(spec, make_spec(LINE, [R], (4,), torch.float64))
    unordered = [make_spec(LINE, [p], (4,), torch.complex64) for p in (Partial("max"), R)]
    with pytest.raises(PlacementError, match=r"Partial\(max\) of torch.complex64: this dtype cannot be reduced by"):
        plan_steps(*unordered)


def test_cost_is_close_to_what_the_plan_pays() -> None:
    latency = LATENCY_BYTES * LINE.size
    for before, after, kinds, nbytes in ONE_AXIS:
        src, dst = make_spec(LINE, [before], BIG), make_spec(LINE, [after], BIG)
        talking = sum(kind not in ("slice", "mask") for kind in kinds.split())
        assert nbytes + talking * latency <= cost(src, dst) <= nbytes + talking * latency + 1000
        assert cost(src, dst) > 0
    for placements in placements_of(2, torch.float32):
        there, back = make_spec(SQUARE, [placements, S1], BIG), make_spec(OTHER, [placements], BIG)
        assert cost(there, back) >= min(V, sum(map(step_bytes, plan_steps(there, back)))) // 4


def test_cost_is_cheap() -> None:
    choices = itertools.product((R, S0, P), (R, S1, P), (R, S2, P))
    specs = [make_spec(mesh_of(9, (2, 2, 2)), placements, (8, 8, 8)) for placements in choices]
    start = time.perf_counter()
    for a in specs:
        for b in specs:
            cost(a, b)
    assert (time.perf_counter() - start) / len(specs) ** 2 < 200e-6  # about 12 us on an idle core
