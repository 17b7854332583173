"""Redistributions of one worker that hosts all devices, against the plain definition in cases.py."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.core.errors import PlacementError
from dtorch.core.placements import REPLICATE, Partial, Shard
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.core.steps import Step
from dtorch.planner.redistribute import plan_steps
from dtorch.worker.collectives import Collectives
from tests.redistribute.cases import (
    DTYPES,
    alone,
    check,
    make_spec,
    mesh_of,
    placements_of,
    random_value,
    redistribute,
    same_bits,
    segmented,
    shapes_up_to,
    split,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MESH_SHAPES = shapes_up_to(8)


@st.composite
def meshes(draw: st.DrawFn, number: int) -> MeshLayout:
    """A mesh of up to eight devices of twelve, in any order."""
    shape = draw(st.sampled_from(MESH_SHAPES))
    devices = draw(st.permutations(range(12))) if draw(st.booleans()) else list(range(12))
    return mesh_of(number, shape, devices[: torch.Size(shape).numel()])


@st.composite
def pairs(draw: st.DrawFn, two_meshes: bool) -> tuple[TensorSpec, TensorSpec]:
    """Two specs of one tensor, on one mesh or on two."""
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    mesh, rng = draw(meshes(0)), draw(st.randoms(use_true_random=False))
    specs = []
    for m in (mesh, draw(meshes(1)) if two_meshes else mesh):
        placements = [segmented(draw(st.sampled_from(placements_of(len(shape), dtype))), shape, rng) for _ in m.shape]
        spec = make_spec(m, placements, shape, dtype, draw(st.permutations(range(len(shape)))))
        if draw(st.booleans()):  # gaps, and any stride where the size is 1
            gap, odd = draw(st.integers(1, 2)), draw(st.integers(1, 9))
            strides = zip(shape, spec.stride, strict=True)
            spec = spec.replace(stride=tuple(odd if n == 1 else s * gap for n, s in strides))
        specs.append(spec)
    return specs[0], specs[1]


def walk(src: TensorSpec, dst: TensorSpec, seed: int) -> None:
    """Run a plan; every state on the way, and the end, must be what its spec says. Inputs stay as they are."""
    rng = random.Random(seed)
    value = random_value(src.shape, src.dtype, rng)
    collectives = alone(src.mesh, dst.mesh)
    local, spec = split(src, value, rng), src
    check(spec, value, local)
    steps = plan_steps(src, dst)
    for step in steps:
        assert step.src == spec
        given_local = [gappy(t, rng) for t in local]
        before = [t.clone() for t in given_local]
        local, spec = collectives.run(step, given_local), step.dst
        check(spec, value, local)
        assert all(same_bits(a, b) for a, b in zip(given_local, before, strict=True))
        seen = [t.untyped_storage().data_ptr() for t in (*given_local, *local) if t.numel()]
        assert len({*seen}) == len(seen)
    assert spec == dst or not steps


def gappy(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The tensor as it is, or with other strides and gaps."""
    if t.ndim == 0 or rng.random() < 0.5:
        return t.clone()
    return torch.stack([t, t], -1).transpose(0, -2).contiguous()[..., 0].transpose(0, -1)


@settings(max_examples=400, deadline=None)
@given(pairs(False), st.integers(0, 2**32))
def test_one_mesh(pair: tuple[TensorSpec, TensorSpec], seed: int) -> None:
    walk(*pair, seed)


@settings(max_examples=200, deadline=None)
@given(pairs(True), st.integers(0, 2**32))
def test_two_meshes(pair: tuple[TensorSpec, TensorSpec], seed: int) -> None:
    walk(*pair, seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_pair_of_placements(dtype: torch.dtype) -> None:
    mesh = mesh_of(0, (3,))
    for a in placements_of(2, dtype):
        for b in placements_of(2, dtype):
            walk(make_spec(mesh, [a], (4, 5), dtype), make_spec(mesh, [b], (4, 5), dtype), 1)


def test_conjugated_and_negated_inputs_are_written_out() -> None:
    mesh = mesh_of(0, (2,))
    src, dst = (make_spec(mesh, [p], (4,), torch.complex64) for p in (Shard(0), REPLICATE))
    value = torch.tensor([1 + 2j, 3 - 1j, 5j, -2 + 0j])
    (step,) = plan_steps(src, dst)
    out = alone(mesh).run(step, [value[:2].conj(), value[2:].conj()])
    assert not out[0].is_conj()
    check(dst, value.conj().resolve_conj(), out)
    negated = value.conj().imag
    assert negated.is_neg()
    src, dst = (make_spec(mesh, [p], (4,)) for p in (Shard(0), REPLICATE))
    out = redistribute(alone(mesh), src, dst, [negated[:2], negated[2:]])
    assert not out[0].is_neg()
    check(dst, -value.imag, out)


def test_masking_keeps_the_sign_of_zero() -> None:
    mesh = mesh_of(0, (3,))
    replicated, partial = (make_spec(mesh, [p], (2,)) for p in (REPLICATE, Partial()))
    zeros = [torch.tensor([-0.0, 0.0])] * 3
    terms = redistribute(alone(mesh), replicated, partial, zeros)
    out = redistribute(alone(mesh), partial, replicated, terms)
    assert [t.signbit().tolist() for t in out] == [[True, False]] * 3


def test_not_a_number_survives_every_reduction() -> None:
    mesh = mesh_of(0, (3,))
    for op in ("sum", "avg", "max", "min", "product"):
        src, dst = (make_spec(mesh, [p], (2,)) for p in (Partial(op), REPLICATE))
        terms = [torch.tensor([1.0, 2.0]), torch.tensor([float("nan"), 2.0]), torch.tensor([1.0, 2.0])]
        for t in redistribute(alone(mesh), src, dst, terms):
            assert t.isnan().tolist() == [True, False]


def test_integer_averages_do_not_overflow() -> None:
    mesh = mesh_of(0, (2,))
    for dtype in (torch.int8, torch.int64, torch.uint32):
        top = torch.iinfo(dtype).max
        src, dst = (make_spec(mesh, [p], (2,), dtype) for p in (Partial("avg"), REPLICATE))
        terms = [torch.tensor([top, 5]).to(dtype), torch.tensor([top, 6]).to(dtype)]
        assert redistribute(alone(mesh), src, dst, terms)[1].tolist() == [top, 5]


def test_several_half_precision_terms_are_rounded_once() -> None:
    mesh = mesh_of(0, (4,))
    src, dst = (make_spec(mesh, [p], (1,), torch.bfloat16) for p in (Partial(), REPLICATE))
    terms = [torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0, 0.0)]
    assert redistribute(alone(mesh), src, dst, terms)[0].item() == 258.0  # 256 + 1 is 256 in bfloat16


def test_wrong_tensors_are_refused() -> None:
    mesh = mesh_of(0, (2,))
    (step,) = plan_steps(make_spec(mesh, [Shard(0)], (4,)), make_spec(mesh, [REPLICATE], (4,)))
    collectives = alone(mesh)
    for bad in ([torch.zeros(2)], [torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(2).double()]):
        with pytest.raises(PlacementError, match="all_gather along mesh axis 0: the local tensors on worker 0 are"):
            collectives.run(step, bad)
    with pytest.raises(PlacementError, match="Mesh 7 has 2 devices, but 1 workers"):
        collectives.add_mesh(mesh_of(7, (2,)), [0])


def test_alone_means_without_messages() -> None:
    mesh = mesh_of(0, (2, 2))
    collectives = Collectives(0, None)
    collectives.add_mesh(mesh, [0] * 4)
    src, dst = make_spec(mesh, [Shard(0), Partial()], (4, 4)), make_spec(mesh, [Shard(1), REPLICATE], (4, 4))
    redistribute(collectives, src, dst, [torch.ones(2, 4)] * 4)
    assert collectives.groups.sent_messages == 0


def test_steps_are_values() -> None:
    mesh = mesh_of(0, (2,))
    src, dst = make_spec(mesh, [Partial()], (4,)), make_spec(mesh, [REPLICATE], (4,))
    assert plan_steps(src, dst) == (Step("all_reduce", 0, src, dst),)
    assert str(plan_steps(src, dst)[0]) == (
        "all_reduce along mesh axis 0 of (4,) float32 [Partial(sum)] to (4,) float32 [Replicate()]"
    )
