"""Copies of tensors and modules: in memory, through pickle and through files."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import dtorch
from tests.engine.helpers import S0, S1, P, R, both_modes, full, layouts, mesh, run_program, same, spread


def saved(x: Any, **load: Any) -> Any:
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **load)


@both_modes
def test_pickle_keeps_values_and_placements(mode):
    on = mesh(2, 2, names=("dp", "tp"))
    for x in (torch.randn(5, 3), torch.arange(6).reshape(3, 2), torch.tensor(1j), torch.zeros(0, 2), torch.ones(3, dtype=torch.bfloat16)):
        for where in ((R, R), (S0, R), (S0, S1), (P, R)):
            if any(p.is_shard() and p.dim >= x.dim() for p in where) or (x.dim() < 2 and S1 in where):
                continue
            d = spread(x, on, *where)
            for out in (pickle.loads(pickle.dumps(d)), saved(d), saved(d, weights_only=True), pickle.loads(pickle.dumps(d, protocol=2))):
                assert type(out) is dtorch.DTensor
                assert out.device_mesh == on
                assert out.device_mesh.mesh_dim_names == ("dp", "tp")
                same(out, x, where)
                out.zero_()
                same(d, x)


def test_a_parameter_stays_one():
    p = torch.nn.Parameter(spread(torch.randn(3), mesh(2), S0))
    q = saved(p)
    assert isinstance(q, torch.nn.Parameter)
    assert q.requires_grad
    same(q, full(p), [S0])
    d = spread(torch.ones(2), mesh(2), R).requires_grad_()
    assert saved(d).requires_grad


def test_structures_and_state_dicts():
    on = mesh(2)
    with on, torch.device("dtorch"):
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    again = saved(net.state_dict(), weights_only=True)
    assert list(again) == list(net.state_dict())
    for k, v in net.state_dict().items():
        same(again[k], full(v), [R])
    optimizer = torch.optim.AdamW(net.parameters())
    net(spread(torch.randn(8, 3), on, S0)).sum().backward()
    optimizer.step()
    state = saved(optimizer.state_dict(), weights_only=True)
    same(state["state"][0]["exp_avg"], full(optimizer.state_dict()["state"][0]["exp_avg"]))
    whole = pickle.loads(pickle.dumps(net))
    x = torch.randn(8, 3)
    same(whole.eval()(x), full(net.eval()(x)))


def test_a_file_is_read_by_plain_torch_and_the_other_way(tmp_path):
    path = tmp_path / "plain.pt"
    x = {"w": torch.randn(4, 3)}
    torch.save(x, path)
    same(spread(torch.load(path)["w"], mesh(2), S0), x["w"], [S0])
    with mesh(2):
        same(torch.load(path, map_location="dtorch")["w"], x["w"], [R])
    other = spread(torch.zeros(1), mesh(3))
    for weights_only in (True, False):
        loaded = torch.load(path, map_location=other.device, weights_only=weights_only)["w"]
        same(loaded, x["w"], [R])
        assert loaded.device_mesh == other.device_mesh
    torch.save({"w": spread(x["w"], mesh(2), S0)}, path)
    plain = torch.load(path, map_location="cpu")["w"]
    assert type(plain) is torch.Tensor
    assert torch.equal(plain, x["w"])
    loaded = torch.load(path, map_location=other.device)["w"]
    same(loaded, x["w"], [S0])
    assert loaded.device_mesh == other.device_mesh


def test_tensors_that_shared_memory_in_a_plain_file_share_it_on_a_mesh():
    base = torch.arange(12.0).reshape(4, 3)
    loaded = saved({"base": base, "row": base[1], "t": base.t(), "tied": base}, map_location="dtorch")
    loaded["row"].fill_(-1)
    base[1] = -1
    for key in ("base", "tied"):
        same(loaded[key], base)
    same(loaded["t"], base.t())
    assert loaded["t"].stride() == (1, 3)


@both_modes
def test_deepcopy(mode):
    for where in layouts(2, mesh(2)):
        d = spread(torch.randn(4, 3), mesh(2), *where)
        c = copy.deepcopy(d)
        same(c, full(d))
        assert [p.is_shard() for p in c.placements] == [p.is_shard() for p in where]
        assert c.device_mesh is d.device_mesh
        c.add_(1)
        d.mul_(0)
        same(d, torch.zeros(4, 3))
    t = copy.copy(spread(torch.ones(2), mesh(2), S0))
    same(t, torch.ones(2))


def test_deepcopy_of_modules_keeps_ties_gradients_and_attributes():
    with mesh(2), torch.device("dtorch"):
        a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    b.weight = a.weight
    net = torch.nn.Sequential(a, b)
    a.weight.tag = "tied"
    net(torch.randn(2, 3)).sum().backward()
    twin = copy.deepcopy(net)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not a.weight
    assert isinstance(twin[0].weight, torch.nn.Parameter)
    assert twin[0].weight.tag == "tied"
    same(twin[0].weight.grad, full(a.weight.grad))
    twin[0].weight.grad.zero_()
    assert full(a.weight.grad).abs().sum() > 0
    with torch.no_grad():
        twin[0].weight.zero_()
    assert full(a.weight).abs().sum() > 0


def test_copies_share_memory_as_the_originals_do():
    x, z = torch.arange(12.0).view(3, 4), torch.ones(2, dtype=torch.complex64)
    for a, c in ((x, z), (spread(x, mesh(2)), spread(z, mesh(2)))):
        b, d, e, f = copy.deepcopy([a[1], a.t()[1:], torch.view_as_real(c), a])
        b.add_(100)
        assert full(d).tolist() == [[1, 105, 9], [2, 106, 10], [3, 107, 11]]
        assert full(e).tolist() == [[1, 0], [1, 0]]
        assert full(f)[1].tolist() == [104, 105, 106, 107]
        assert full(a).tolist() == x.tolist()


def test_deepcopy_of_a_result_is_refused_as_by_torch():
    d = spread(torch.ones(2), mesh(2), R).requires_grad_()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(d * 2)


def test_mesh_and_placements_pickle():
    m, used = mesh(2, 3, names=("a", "b")), mesh(2)
    spread(torch.ones(2), used)
    for p in (m, used, S0, R, P, dtorch.Partial("max")):
        assert pickle.loads(pickle.dumps(p)) == p
        assert copy.deepcopy(p) == p


def test_another_process_reads_it(tmp_path):
    torch.save(spread(torch.arange(6.0), mesh(3), S0), tmp_path / "x.pt")
    done = run_program(
        "import dtorch, torch\nx = torch.load('x.pt', weights_only=True)\nprint(x.placements, x.sum().item(), x.device_mesh.devices)\n"
        .replace("'x.pt'", repr(str(tmp_path / "x.pt"))),
        tmp_path, mode="inline",
    )  # fmt: skip
    assert done.stdout == "(Shard(dim=0),) 15.0 (0, 1, 2)\n"


def test_numpy_and_safetensors(tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    d = spread(torch.randn(4, 3), mesh(2), S0)
    save_file({"w": d, "v": d.clone()}, tmp_path / "x.safetensors")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["w"], full(d))
    with mesh(2), torch.device("dtorch"):
        net, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    for m in (net, other):
        m.twin = torch.nn.Linear(3, 4, device="meta")
        m.twin.weight, m.twin.bias = m.weight, m.bias  # shared: written once
    save_model(net, str(tmp_path / "m.safetensors"))
    assert len(load_file(tmp_path / "m.safetensors")) == 2
    load_model(other, str(tmp_path / "m.safetensors"))
    same(other.weight, full(net.weight))
