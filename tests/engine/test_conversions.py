"""From plain to distributed tensors and back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import dtorch
from dtorch.core.errors import PlacementError
from tests.engine.helpers import S0, S1, P, R, both_modes, full, layouts, mesh, run_program, same, spread

SEED_PROGRAM = """
import dtorch
mesh = dtorch.DeviceMesh("cpu", [0, 1])
x = dtorch.rand((4, 3), device_mesh=mesh, placements=[dtorch.Shard(0)])
print(f"{x=}")
"""


@pytest.mark.parametrize("mode", ["inline", "local"])
def test_the_seed_program(mode, tmp_path):
    done = run_program(SEED_PROGRAM, tmp_path, mode="" if mode == "local" else mode)
    assert done.stdout.startswith("x=DTensor([[")
    assert "device_mesh=DeviceMesh('cpu', [0, 1]), placements=[Shard(dim=0)]" in done.stdout
    assert done.stderr == ""


@both_modes
def test_there_and_back(mode):
    for shape in [(), (1,), (0,), (5,), (4, 3), (0, 3), (3, 0, 2), (7, 2, 3)]:
        x = torch.randn(shape)
        for on in (mesh(1), mesh(2), mesh(3)):
            for where in layouts(len(shape), on):
                d = dtorch.Tensor(x, device_mesh=on, placements=where)
                assert type(d) is dtorch.DTensor
                assert isinstance(d, torch.Tensor)
                same(d, x, where)
                assert torch.equal(d.cpu(), x)
                assert torch.equal(d.full_tensor(), x)
                assert torch.equal(d.to("cpu"), x)
                assert type(d.to_torch()) is torch.Tensor
                assert d.tolist() == x.tolist()
                assert np.array_equal(d.numpy(), x.numpy())


def test_what_it_is_made_of():
    on = mesh(2)
    for data in ([[1, 2], [3, 4]], np.ones((2, 3)), 5, (1.5, 2.5), True, np.float32(3)):
        same(dtorch.Tensor(data, device_mesh=on), torch.tensor(data), [R])
    base = torch.randn(6, 4)
    for x in (base.t(), base[::2], base[:, 1:3], base.expand(2, 6, 4), base[None].to(memory_format=torch.contiguous_format)):
        for where in layouts(x.dim(), on):
            same(spread(x, on, *where), x, where)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    d = spread(image, on, S0)
    assert d.stride() == image.stride()
    assert d.to_torch().stride() == image.stride()
    c = torch.randn(4, 2, dtype=torch.complex64)
    same(spread(c.conj(), on, S0), c.conj())
    same(spread(c.imag, on, S0), c.imag)
    same(spread(torch.nn.Parameter(base), on, S0), base)
    d = spread(base, on, S0)
    same(dtorch.Tensor(d, device_mesh=on, placements=[S1]), base, [S1])
    assert dtorch.distribute_tensor(base, on, [S1]).placements == (S1,)
    with on:
        same(dtorch.Tensor(base, placements=[S0]), base, [S0])
    base.zero_()
    assert full(d).abs().sum() > 0  # a copy, not a view


def test_requires_grad_of_a_distributed_leaf():
    d = dtorch.Tensor(torch.ones(3), device_mesh=mesh(2), placements=[S0], requires_grad=True)
    assert d.requires_grad
    assert d.is_leaf
    with pytest.raises(RuntimeError, match=r"detach\(\).numpy\(\)"):
        d.numpy()
    assert d.detach().numpy().sum() == 3
    assert np.asarray(d.detach()).shape == (3,)
    assert d.tolist() == [1, 1, 1]


def test_sparse_and_quantized_tensors_are_refused_clearly():
    with pytest.raises(RuntimeError, match="strided"):
        spread(torch.eye(3).to_sparse(), mesh(2), R)
    with pytest.raises(RuntimeError, match="strided"):
        torch.eye(3).to_sparse().to("dtorch")


@both_modes
def test_numbers(mode):
    on = mesh(2)
    d = spread(torch.tensor([[1.5, -2.0], [3.0, 4.0]]), on, S0)
    assert d.sum().item() == 6.5
    assert float(d[0, 0]) == 1.5
    assert int(d[1, 1]) == 4
    assert bool((d > -3).all()) is True
    assert not (d > 3).all()
    assert (d.max() > 3) and not (d.min() > 0)
    assert [1, 2, 3][spread(torch.tensor(2), on)] == 3
    assert complex(spread(torch.tensor(1 + 2j), on)) == 1 + 2j
    assert len(d) == 2
    assert [row.tolist() for row in d] == d.tolist()
    assert 3.0 in d
    assert f"{d.sum():.2f}" == "6.50"
    assert f"{spread(torch.tensor(7), on)}" == "7"
    assert round(d.sum().item()) == 6
    assert math.isclose(math.sqrt(d[1, 1]), 2)
    assert d.sum() == 6.5
    assert torch.equal(d, d.clone())
    assert not torch.equal(d, d + 1)
    assert not torch.equal(d, d[0])
    assert torch.allclose(d, d + 1e-9)
    with pytest.raises(RuntimeError, match="Tensor with 4 elements cannot be converted to Scalar"):
        d.item()
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with more than one value is ambiguous"):
        bool(d)
    with pytest.raises(TypeError):
        len(d.sum())
    with pytest.raises(TypeError):
        hash({d: 1}) and d.__index__()


def test_hash_and_identity():
    a, b = dtorch.zeros(2), dtorch.zeros(2)
    assert len({a, b, a}) == 2
    assert a is not b


@both_modes
def test_print(mode):
    on = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    d = spread(torch.arange(6.0).reshape(2, 3), on, S0)
    assert repr(d) == (
        "DTensor([[0., 1., 2.],\n        [3., 4., 5.]], device_mesh=DeviceMesh('cpu', [0, 1], mesh_dim_names=('dp',)), "
        "placements=[Shard(dim=0)])"
    )
    assert "dtype=torch.int32" in repr(d.int())
    assert "requires_grad=True" in repr(d.clone().requires_grad_())
    assert "grad_fn=<MulBackward0>" in repr(d.clone().requires_grad_() * 2)
    assert repr(torch.nn.Parameter(d)).startswith("Parameter")
    assert "..." in str(dtorch.zeros(2000, device_mesh=on, placements=[S0]))
    assert "[]" in repr(d[:0])
    assert "Partial(sum)" in repr(dtorch.ones(2, device_mesh=on, placements=[P]))
    with torch.inference_mode():
        assert "[0., 1., 2.]" in repr(d * 1)


@both_modes
def test_pieces(mode):
    on = mesh(2, 2, first=1)
    x = torch.arange(15.0).reshape(5, 3)
    d = spread(x, on, S0, S1)
    for device, want in ((1, x[:3, :2]), (2, x[:3, 2:]), (3, x[3:, :2]), (4, x[3:, 2:])):
        for name in (device, f"cpu:{device}", torch.device("cpu", device)):
            piece = d.to_local(name)
            assert type(piece) is torch.Tensor
            assert torch.equal(piece, want)
    assert torch.equal(d.to_local(), x[:3, :2])
    assert torch.equal(d.to_local("cpu"), x[:3, :2])
    assert torch.equal(spread(x, on, S0, S0).to_local(4), x[4:])
    assert spread(torch.ones(1, 3), on, S0, R).to_local(4).shape == (0, 3)
    assert torch.equal(spread(x, on, R, S1).t().to_local(2), x.t()[2:])
    assert torch.equal(d.to_local(1).t(), d.t().to_local(1))
    for wrong in (0, 5, "cpu:7", "cuda:1", "dtorch:1"):
        with pytest.raises(PlacementError, match="devices are \\[1, 2, 3, 4\\]"):
            d.to_local(wrong)
    c = spread(torch.tensor([1j, 2j]), mesh(2), S0).conj()
    assert torch.equal(c.to_local(1), torch.tensor([-2j]))


@both_modes
def test_gradient_of_a_piece(mode):
    x = torch.arange(5.0, requires_grad=True)
    d = spread(x.detach(), mesh(2), S0).requires_grad_()
    piece = d.to_local(1)
    assert piece.requires_grad
    (piece * torch.tensor([2.0, 3.0])).sum().backward()
    (x[3:] * torch.tensor([2.0, 3.0])).sum().backward()
    same(d.grad, x.grad)
    whole = spread(x.detach(), mesh(2), R).requires_grad_()
    (whole.to_local(1) * 2).sum().backward()
    same(whole.grad, torch.full((5,), 2.0))
    assert not d.detach().to_local(1).requires_grad
    with torch.no_grad():
        assert not d.to_local(1).requires_grad
    terms = (spread(torch.ones(4), mesh(2), S0).requires_grad_() * 2).sum()
    assert terms.placements == (P,)
    with pytest.raises(PlacementError, match="redistribute"):
        terms.to_local(1)
    assert terms.detach().to_local(0).item() == 4


def test_moves_between_devices_and_dtypes():
    on, other = mesh(2), mesh(3)
    d, e = spread(torch.randn(4, 3), on, S0), spread(torch.zeros(2), other)
    same(d.to(e.device), full(d), [S0])
    assert d.to(e.device).device_mesh == other
    assert d.to(d.device) is d
    assert d.to(torch.float32) is d
    same(d.to(torch.float64), full(d).double(), [S0])
    same(d.to(e), full(d))
    assert d.to("meta").device.type == "meta"
    same(d.to(e.device, torch.float16), full(d).half())
    assert type(d.to("cpu", torch.float64)) is torch.Tensor
    assert torch.equal(d.cpu(), full(d))
    with on:
        same(torch.ones(2).to("dtorch"), torch.ones(2), [R])
        same(torch.ones(2).dtorch(), torch.ones(2))
    same(torch.ones(2).to(e.device), torch.ones(2))
    same(torch.ones(2).to(d), torch.ones(2))
    same(d.half().float(), full(d).half().float())
    assert d.type(torch.int32).dtype == torch.int32
    same(d.cpu().to(d.device), full(d), [R])
    same(d.dtorch(e.device.index), full(d))
    for t in (d.pin_memory(), d.contiguous(), d.detach(), d.requires_grad_(False)):
        same(t, full(d))
    with pytest.raises((BufferError, ValueError)):
        torch.from_dlpack(d)
    assert d.device.type == "dtorch"
    assert d.is_contiguous()
    assert not d.is_cpu
    assert not d.is_cuda


def test_attributes_of_the_wrapper():
    x = torch.randn(4, 3)
    d = spread(x, mesh(2), S0)
    assert d.shape == x.shape
    assert d.stride() == x.stride()
    assert d.t().stride() == x.t().stride()
    assert d[1:, 1:].storage_offset() == x[1:, 1:].storage_offset() == 4
    assert d.numel() == 12
    assert d.element_size() == 4
    assert d.nbytes == 48
    assert d.dim() == d.ndim == 2
    assert d.is_floating_point()
    assert d.untyped_storage().nbytes() == 48
    assert d.data_ptr() == d.view(-1).data_ptr() != d.clone().data_ptr()
    assert d.data_ptr() != spread(x, mesh(2), S0).data_ptr()
    assert d.mT.shape == (3, 4)
    assert d.T.shape == (3, 4)
