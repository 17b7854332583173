"""``redistribute`` and its relatives: the value never changes, wherever it goes."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.core.errors import PlacementError
from tests.engine.helpers import S0, S1, P, R, both_modes, full, layouts, local_mode, mesh, same, spread


@pytest.mark.parametrize("shape", [(5, 4), (4, 1), (0, 3), (7,), ()])
@pytest.mark.parametrize("on", [(1,), (2,), (3,)])
def test_every_pair_of_placements(shape, on):
    x, m = torch.randn(shape), mesh(*on)
    for before in layouts(len(shape), m):
        d = spread(x, m, *before)
        for after in layouts(len(shape), m):
            same(d.redistribute(placements=after), x, after)
            same(d, x, before)


def test_every_pair_of_placements_on_two_axes():
    x, m = torch.arange(20).reshape(5, 4), mesh(2, 2)
    for before in layouts(2, m):
        d = spread(x, m, *before)
        for after in layouts(2, m):
            same(d.redistribute(placements=after), x, after)


@local_mode
def test_pairs_over_processes(mode):
    x, m = torch.randn(5, 3), mesh(3)
    for before in layouts(2, m):
        d = spread(x, m, *before)
        for after in layouts(2, m):
            same(d.redistribute(placements=after), x, after)
    n = mesh(2, 2)
    for before in ((S0, S0), (S0, S1), (P, S0), (R, R)):
        for after in ((S1, S1), (S0, R), (P, P), (S1, S0)):
            same(spread(x, n, *before).redistribute(placements=after), x, after)


@both_modes
def test_between_meshes(mode):
    x = torch.randn(5, 4)
    meshes = [mesh(2), mesh(2, first=1), mesh(2, first=2), mesh(3), mesh(1), mesh(2, 2), mesh(1, first=3)]
    for source in meshes:
        for target in meshes:
            for before, after in (((S0, S1), (S1, S0)), ((R, S0), (S0, R)), ((P, S1), (S0, P)), ((S0, S0), (R, R))):
                d = spread(x, source, *before[: source.ndim])
                out = d.redistribute(target, after[: target.ndim])
                same(out, x, after[: target.ndim])
                assert out.device_mesh == target
                same(d, x)


def test_devices_in_another_order():
    x, a, b = torch.arange(6), dtorch.DeviceMesh("cpu", [0, 1, 2]), dtorch.DeviceMesh("cpu", [2, 0, 1])
    d = spread(x, a, S0).redistribute(b, [S0])
    same(d, x, [S0])
    assert d.to_local(2).tolist() == [0, 1]


def test_mesh_alone_keeps_placements():
    d = spread(torch.randn(4, 4), mesh(2), S1)
    assert d.redistribute(mesh(3)).placements == (S1,)
    assert d.redistribute().placements == (S1,)
    same(d.redistribute(mesh(3)), full(d))
    with pytest.raises(PlacementError, match="placements="):
        d.redistribute(mesh(2, 2))
    assert d.redistribute(placements=[Shard(-1)]).placements == (S1,)


def test_reductions_of_partial_tensors():
    m = mesh(3)
    x = torch.tensor([[3.0, -6.0, 9.0]])
    for op in ("sum", "avg", "max", "min"):
        d = spread(x, m, Partial(op))
        assert d.placements == (Partial(op),)
        same(d.redistribute(placements=[R]), x, [R])
        same(d.redistribute(placements=[S1]), x, [S1])
        same(spread(x, m, S1).redistribute(placements=[Partial(op)]), x, [Partial(op)])
    same(spread(torch.tensor([7, 8, 9]), m, P).redistribute(placements=[S0]), torch.tensor([7, 8, 9]))
    same(spread(torch.tensor([True, False]), m, Partial("max")), torch.tensor([True, False]))


def test_torch_placements_are_understood():
    from torch.distributed.tensor import Partial as TorchPartial
    from torch.distributed.tensor import Replicate as TorchReplicate
    from torch.distributed.tensor import Shard as TorchShard

    x = torch.randn(4, 3)
    d = dtorch.Tensor(x, device_mesh=mesh(2), placements=[TorchShard(0)])
    assert d.placements == (S0,)
    assert d.placements[0] == TorchShard(0)
    assert d.redistribute(placements=[TorchReplicate()]).placements == (Replicate(),)
    assert d.redistribute(placements=[TorchPartial("sum")]).placements == (P,)


@both_modes
def test_like(mode):
    x = torch.randn(4, 4)
    a, b = spread(x, mesh(2), S0), spread(x, mesh(2, 2), S1, R)
    same(a.redistribute_like(b), x, [S1, R])
    assert a.redistribute_like(b).device_mesh == b.device_mesh
    same(b.redistribute_like(a), x, [S0])


def test_by_axis_name():
    m = mesh(2, 2, 2, names=("dp", "tp", "ulysess_cp"))
    x = torch.randn(4, 4, 4)
    d = spread(x, m, S0, S1, R)
    by = d.redistribute_by_dict
    same(by(placements_dict={"dp": R, "tp": S0, "ulysess_cp": Shard(2)}), x, [R, S0, Shard(2)])
    same(by({"tp": R}, default_placement_mode="replicate"), x, [R, R, R])
    same(by({"tp": R}, "keep"), x, [S0, R, R])
    same(by({}, "keep"), x, [S0, S1, R])
    same(by({"ulysses_cp": Shard(2)}, "keep"), x, [S0, S1, Shard(2)])
    with pytest.raises(PlacementError, match=r"mesh axes \['dp', 'ulysess_cp'\]"):
        by({"tp": R})
    with pytest.raises(PlacementError, match=r"no axis 'pp': its axes are \['dp', 'tp', 'ulysess_cp'\]"):
        by({"pp": R}, "keep")
    with pytest.raises(PlacementError, match="'raise_error', 'replicate' or 'keep'"):
        by({"tp": R}, "guess")
    with pytest.raises(PlacementError, match="Shard\\(3\\)"):
        by({"tp": Shard(3)}, "keep")
    with pytest.raises(PlacementError, match=r"(?s)'pp'.*'guess'|'guess'.*'pp'"):
        by({"pp": R}, "guess")


def test_a_mesh_taken_apart():
    m = mesh(2, 3, names=("pp", "dp"))
    stages = m.unbind("pp")
    assert [s.devices for s in stages] == [(0, 1, 2), (3, 4, 5)]
    assert stages[0].mesh_dim_names == ("dp",)
    x = torch.randn(6, 2)
    d = spread(x, stages[0], S0)
    same(d.redistribute(stages[1]), x, [S0])
    assert m["dp"].devices == (0, 1, 2)
    assert m["pp"].devices == (0, 3)
    assert m.size("dp") == 3
    assert m.size() == 6
    assert dtorch.init_device_mesh("cpu", (2, 3), mesh_dim_names=("pp", "dp")) == m
    with pytest.raises(PlacementError, match="no axis 'tp'"):
        m["tp"]


@both_modes
def test_gradients(mode):
    x = torch.randn(4, 4)
    a, b = mesh(2), mesh(2, 2)
    for before, after in (((S0,), (S1, R)), ((R,), (S0, S0)), ((S1,), (R, R))):
        d = spread(x, a, *before).requires_grad_()
        (d.redistribute(b, after) ** 2).sum().backward()
        same(d.grad, 2 * x, before)
    terms = spread(x, a, S0).requires_grad_()
    w = spread(torch.eye(4), a, S0)
    y = terms.t() @ w  # contracted over the cut dimension
    assert y.placements == (P,)
    y.redistribute(placements=[S0]).sum().backward()
    plain = x.clone().requires_grad_()
    (plain.t() @ torch.eye(4)).sum().backward()
    same(terms.grad, plain.grad, [S0])


def test_shadows_move_along():
    on, other = mesh(2), mesh(3)
    d = spread(torch.arange(4), on, S0)
    e = d.redistribute(other, [S0])
    d.add_(1)
    same(e, torch.arange(4))
    e.mul_(2)
    same(d, torch.arange(4) + 1)
    same(e, torch.arange(4) * 2)


def test_a_redistributed_copy_is_a_tensor_of_its_own():
    d = spread(torch.ones(4), mesh(2), S0)
    for e in (d.redistribute(placements=[R]), d.redistribute(mesh(3), [S0])):
        e.add_(1)
        same(d, torch.ones(4))


@both_modes
def test_many_dtypes_travel(mode):
    on, other = mesh(2), mesh(3)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        x = (torch.arange(10).reshape(5, 2) % 3).to(dtype)
        d = spread(x, on, S0)
        same(d.redistribute(placements=[S1]), x, [S1])
        same(d.redistribute(other, [S0]), x, [S0])
        if dtype != torch.bool:
            same(d.redistribute(placements=[P]).redistribute(placements=[S0]), x, [S0])
