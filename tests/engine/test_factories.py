"""Factories: torch's arguments, torch's values, on any mesh and placement."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch.core.errors import PlacementError
from tests.engine.helpers import OPTIONS, S0, S1, P, R, both_modes, full, layouts, mesh, same, spread

CALLS = [
    ("zeros", (3, 5), {}),
    ("zeros", ((3, 5),), {"dtype": torch.int64}),
    ("zeros", (), {"size": (3, 5)}),
    ("zeros", (0, 5), {}),
    ("ones", (torch.Size([5, 3]),), {"dtype": torch.bfloat16}),
    ("ones", ([7],), {"dtype": torch.complex64}),
    ("full", ((3, 5), 7), {}),
    ("full", ((3, 5), 2.5), {}),
    ("full", ((3, 5), True), {}),
    ("full", (), {"size": (3, 5), "fill_value": 1 + 2j}),
    ("full", ((3, 5), 2), {"dtype": torch.float16}),
    ("arange", (7,), {}),
    ("arange", (2, 9), {}),
    ("arange", (2, 9, 2), {}),
    ("arange", (0, 1, 0.1), {}),
    ("arange", (5.0,), {}),
    ("arange", (), {"end": 5}),
    ("arange", (0, 10), {"step": 3}),
    ("arange", (), {"start": 1, "end": 7, "step": 2, "dtype": torch.float32}),
    ("arange", (9, 2, -2), {}),
    ("linspace", (0, 1, 7), {}),
    ("linspace", (-2.0, 3.0), {"steps": 5, "dtype": torch.float64}),
    ("logspace", (0, 3, 5), {}),
    ("logspace", (0, 3), {"steps": 4, "base": 2.0, "dtype": torch.float64}),
    ("randperm", (11,), {}),
    ("tril_indices", (3, 4), {}),
    ("triu_indices", (3, 4), {"offset": 1}),
    ("eye", (5,), {}),
    ("eye", (3, 5), {"dtype": torch.int32}),
    ("eye", (), {"n": 3}),
    ("rand", (3, 5), {}),
    ("rand", ((5, 3),), {"dtype": torch.float64}),
    ("randn", (3, 5), {}),
    ("randn", (5, 3), {"dtype": torch.complex64}),
    ("randint", (10, (3, 5)), {}),
    ("randint", (-3, 10, (3, 5)), {"dtype": torch.int32}),
    ("randint", (), {"low": 2, "high": 9, "size": (5,)}),
    ("randint", (10,), {"size": (3, 5)}),
    ("tensor", ([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],), {}),
    ("tensor", ([[1, 2], [3, 4], [5, 6]],), {"dtype": torch.int16}),
    ("tensor", ([True, False, True],), {}),
    ("tensor", ([1j, 2.0],), {}),
]


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS, ids=lambda v: str(v)[:40])
def test_values_are_those_of_torch(name, args, kwargs):
    for on in (mesh(1), mesh(2), mesh(3), mesh(2, 2)):
        torch.manual_seed(3)
        want = getattr(torch, name)(*args, **kwargs)
        for where in layouts(want.dim(), on, partial=want.dtype != torch.bool):
            torch.manual_seed(3)
            got = getattr(dtorch, name)(*args, **kwargs, device_mesh=on, placements=where)
            same(got, want, where)
            assert got.stride() == want.stride()
            assert got.requires_grad is False


@pytest.mark.parametrize("size", [(), (1,), (0,), (3, 0), (1, 7)])
def test_odd_sizes(size):
    for on in (mesh(2), mesh(3)):
        for where in layouts(len(size), on):
            same(dtorch.ones(size, device_mesh=on, placements=where), torch.ones(size), where)
            assert dtorch.empty(size, device_mesh=on, placements=where).shape == size


@both_modes
def test_the_first_mesh_made_is_the_default_one(mode):
    dtorch.shutdown()
    dtorch.init(**OPTIONS[mode])
    first = dtorch.DeviceMesh("cpu", [0, 1])
    dtorch.DeviceMesh("cpu", [0, 1, 2])
    assert dtorch.zeros(3).device_mesh == first == torch.ones(2).to("dtorch").device_mesh


@both_modes
def test_without_a_mesh_they_are_on_the_default_one(mode):
    dtorch.shutdown()
    dtorch.init(**OPTIONS[mode])
    x = dtorch.zeros(3)
    assert x.placements == (R,)
    assert x.device_mesh.size() == 1
    other = mesh(2)
    with other:
        y = dtorch.ones(4, placements=[S0])
        z = dtorch.tensor([1, 2])
    assert y.device_mesh == other == z.device_mesh
    assert y.placements == (S0,)
    with other, mesh(3):
        assert dtorch.zeros(2).device_mesh.size() == 3
    assert dtorch.zeros(2).device_mesh == x.device_mesh


@both_modes
def test_a_selected_device_is_the_default_until_the_block_or_the_session_ends(mode):
    a, b = dtorch.zeros(2, device_mesh=mesh(2)), dtorch.zeros(2, device_mesh=mesh(3))
    torch.dtorch.set_device(b.device.index)
    assert dtorch.zeros(1).device_mesh == torch.zeros(1, device="dtorch").device_mesh == b.device_mesh
    with a.device_mesh:
        assert dtorch.zeros(1).device_mesh == a.device_mesh
        torch.dtorch.set_device(b.device.index)
        assert dtorch.zeros(1).device_mesh == b.device_mesh
    torch.dtorch.set_device(a.device.index)
    assert dtorch.zeros(1).device_mesh == torch.ones(1).to("dtorch").device_mesh == a.device_mesh
    torch.dtorch.set_device(b.device.index)
    dtorch.shutdown()
    dtorch.init(**OPTIONS[mode])
    assert dtorch.zeros(1).device_mesh.size() == torch.zeros(1, device="dtorch").device_mesh.size() == 1


@both_modes
def test_a_block_outlives_its_session(mode):
    with mesh(2) as block:
        dtorch.zeros(2)
        dtorch.shutdown()
        dtorch.init(**OPTIONS[mode])
        assert torch.zeros(1, device="dtorch").device_mesh == block == dtorch.zeros(2).device_mesh


@both_modes
def test_device_names_a_mesh(mode):
    a, b = dtorch.zeros(2, device_mesh=mesh(2)), dtorch.zeros(2, device_mesh=mesh(3))
    for device in (b.device, str(b.device)):
        assert dtorch.ones(2, device=device).device_mesh == b.device_mesh
        assert dtorch.tensor([1], device=device).device_mesh == b.device_mesh
        assert dtorch.zeros_like(a, device=device).device_mesh == b.device_mesh
        assert torch.arange(2, device=device).device_mesh == b.device_mesh
        assert dtorch.rand(4, device=device, placements=[S0]).placements == (S0,)
    with pytest.raises(RuntimeError, match="no device dtorch:60"):
        dtorch.zeros(2, device="dtorch:60")


def test_device_of_plain_tensors_gives_plain_tensors():
    for x in (dtorch.zeros(2, device="cpu"), dtorch.tensor([1], device="cpu"), dtorch.zeros_like(dtorch.zeros(2), device="cpu")):
        assert type(x) is torch.Tensor
    assert dtorch.empty(2, 3, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: dtorch.zeros(2, **k), lambda **k: dtorch.arange(3, **k), lambda **k: dtorch.tensor([1.0], **k),
        lambda **k: dtorch.rand_like(torch.ones(2), **k), lambda **k: dtorch.full((2,), 1, **k),
        lambda **k: dtorch.eye(2, **k), lambda **k: dtorch.zeros_like(dtorch.ones(2), **k),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["dtorch", "cpu", "dtorch:0"])
def test_device_and_mesh_together_are_refused(make, device):
    with pytest.raises(PlacementError, match="device= or device_mesh=, not both"):
        make(device=device, device_mesh=mesh(2))


def test_device_of_plain_tensors_and_placements_are_refused():
    with pytest.raises(PlacementError, match="device='cpu'"):
        dtorch.zeros(2, device="cpu", placements=[R])


def test_arguments_that_torch_refuses():
    for make in (
        lambda: dtorch.zeros(2, dtyp=torch.int32),
        lambda: dtorch.full((2, 2)),
        lambda: dtorch.arange(),
        lambda: dtorch.zeros("a"),
        lambda: dtorch.ones_like(dtorch.zeros(2), sise=3),
        lambda: dtorch.linspace(0, 1),
    ):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(RuntimeError, match="negative"):
        dtorch.zeros(-1)


def test_requires_grad():
    on = mesh(2)
    for x in (
        dtorch.ones(4, device_mesh=on, placements=[S0], requires_grad=True),
        dtorch.tensor([1.0, 2.0], device_mesh=on, requires_grad=True),
        dtorch.randn_like(dtorch.ones(3, device_mesh=on), requires_grad=True),
    ):
        assert x.requires_grad
        assert x.is_leaf
        (x * x).sum().backward()
        same(x.grad, 2 * full(x))


def test_default_dtype():
    try:
        torch.set_default_dtype(torch.float64)
        assert dtorch.zeros(2).dtype == dtorch.rand(2).dtype == dtorch.tensor([1.0]).dtype == torch.float64
        same(dtorch.linspace(0, 1, 3), torch.linspace(0, 1, 3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtorch.zeros(2).dtype == torch.float32
    same(dtorch.linspace(0, 1, 3), torch.linspace(0, 1, 3))


def test_memory_formats():
    x = dtorch.empty((2, 3, 4, 5), memory_format=torch.channels_last, device_mesh=mesh(2), placements=[S1])
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert dtorch.empty(2, pin_memory=False, layout=torch.strided).shape == (2,)


LIKES = ["zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"]


@pytest.mark.parametrize("name", [*LIKES, "full_like", "randint_like"])
@pytest.mark.parametrize("transposed", [False, True])
def test_like(name, transposed):
    extra = {"full_like": (7,), "randint_like": (9,)}.get(name, ())
    for on in (mesh(2), mesh(3)):
        for source in layouts(2, on):
            x = torch.randn(4, 5)
            d = spread(x, on, *source)
            x, d = (x.t(), d.t()) if transposed else (x, d)
            torch.manual_seed(1)
            want = getattr(torch, name)(x, *extra)
            torch.manual_seed(1)
            got = getattr(dtorch, name)(d, *extra)
            assert got.stride() == want.stride()
            assert [p.is_shard() for p in got.placements] == [p.is_shard() for p in d.placements]
            if name != "empty_like":
                same(got, want)
            for where in layouts(2, on):
                torch.manual_seed(1)
                got = getattr(dtorch, name)(d, *extra, placements=where)
                assert got.stride() == want.stride()
                assert got.placements == where
                if name != "empty_like":
                    same(got, want)


def test_like_of_plain_tensors_and_other_dtypes():
    x = torch.randn(4, 5)
    same(dtorch.zeros_like(x, device_mesh=mesh(2), placements=[S0]), torch.zeros(4, 5), [S0])
    same(dtorch.ones_like(x, dtype=torch.int64, placements=[R]), torch.ones(4, 5, dtype=torch.int64))
    d = spread(x, mesh(2), S0)
    same(dtorch.full_like(d, 3, dtype=torch.int32), torch.full((4, 5), 3, dtype=torch.int32), [S0])
    same(torch.zeros_like(d), torch.zeros(4, 5), [S0])
    same(dtorch.zeros_like(d, device_mesh=mesh(3)), torch.zeros(4, 5))
    assert dtorch.empty_like(d.to(torch.complex64)).dtype == torch.complex64


def test_torch_factories_on_the_device():
    on = mesh(2)
    with on:
        x = torch.zeros(3, device="dtorch")
        assert x.device_mesh == on
        same(torch.arange(3, device=x.device), torch.arange(3), [R])
        same(torch.eye(3, device="dtorch"), torch.eye(3))
        same(torch.tensor([[1, 2]], device="dtorch"), torch.tensor([[1, 2]]))
        same(torch.as_tensor([1.5], device="dtorch"), torch.tensor([1.5]))
        same(torch.logspace(0, 2, 5, device="dtorch"), torch.logspace(0, 2, 5))
        same(torch.tril_indices(3, 4, device="dtorch"), torch.tril_indices(3, 4))
        same(torch.scalar_tensor(3.0, device="dtorch"), torch.scalar_tensor(3.0))
        same(torch.hann_window(6, device="dtorch"), torch.hann_window(6))
        torch.manual_seed(0)
        want = torch.randperm(9)
        torch.manual_seed(0)
        same(torch.randperm(9, device="dtorch"), want)
        same(torch.complex(torch.ones(2, device="dtorch"), torch.zeros(2, device="dtorch")), torch.ones(2, dtype=torch.complex64))
        same(torch.empty_strided((2, 3), (1, 2), device="dtorch").fill_(1), torch.ones(2, 3))
    d = spread(torch.randn(4, 4), on, S0)
    same(d.new_zeros(2, 3), torch.zeros(2, 3))
    same(d.new_full((2,), 5), torch.full((2,), 5.0))
    same(d.new_tensor([1, 2]), torch.tensor([1.0, 2.0]))
    same(d.new_ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.int32))
    assert type(d.new_zeros(2, device="cpu")) is torch.Tensor


def test_set_default_device_and_device_context():
    on = mesh(2)
    try:
        with on:
            torch.set_default_device("dtorch")
            assert torch.zeros(2).device_mesh == on
            assert torch.nn.Linear(2, 3).weight.device_mesh == on
    finally:
        torch.set_default_device(None)
    with on, torch.device("dtorch"):
        assert isinstance(torch.ones(2), dtorch.DTensor)
    assert type(torch.ones(2)) is torch.Tensor


def test_what_dtorch_does_not_define_is_torch():
    assert dtorch.float32 is torch.float32
    assert dtorch.nn.Linear is torch.nn.Linear
    assert dtorch.no_grad is torch.no_grad
    with pytest.raises(AttributeError, match="neither 'dtorch' nor 'torch'"):
        dtorch.no_such_thing


def test_partial_placements_hold_terms():
    on = mesh(3)
    x = dtorch.full((2, 3), 6.0, device_mesh=on, placements=[P])
    terms = [x.to_local(i) for i in range(3)]
    torch.testing.assert_close(sum(terms), torch.full((2, 3), 6.0))
