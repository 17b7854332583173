"""Randomness does not depend on placement: the same seed gives torch's own bits on any mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtorch
from tests.engine.helpers import S0, S1, P, R, both_modes, close, full, layouts, local_mode, mesh, same, spread

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal_": lambda x: x.clone().normal_(1, 2),
    "uniform_": lambda x: x.clone().uniform_(-1, 3),
    "random_": lambda x: x.clone().random_(10),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "exponential_": lambda x: x.clone().exponential_(2),
    "geometric_": lambda x: x.clone().geometric_(0.4),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "normal of tensors": lambda x: torch.normal(x, x.abs() + 1),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "poisson": lambda x: torch.poisson(x.abs() * 3),
    "multinomial": lambda x: torch.multinomial(x.abs() + 0.1, 3),
    "multinomial with replacement": lambda x: torch.multinomial(x.abs() + 0.1, 5, replacement=True),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.4),
    "dropout in place": lambda x: torch.nn.functional.dropout(x.clone(), 0.4, inplace=True),
    "alpha_dropout": lambda x: torch.nn.functional.alpha_dropout(x, 0.4, training=True),
    "feature dropout": lambda x: torch.nn.functional.dropout1d(x, 0.5),
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "gumbel_softmax": lambda x: torch.nn.functional.gumbel_softmax(x),
    "binomial": lambda x: torch.binomial(x.abs() * 5 + 1, torch.sigmoid(x)),
    "transposed": lambda x: x.t().clone().normal_(),
    "in a view": lambda x: x.clone()[1:, ::2].normal_(),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
    "orthogonal": lambda x: torch.nn.init.orthogonal_(x.clone()),
    "trunc_normal": lambda x: torch.nn.init.trunc_normal_(x.clone()),
    "shuffle": lambda x: x[torch.randperm(len(x), device=x.device)],
}
INEXACT = {"orthogonal", "gumbel_softmax"}  # what is done with the numbers is rounded in another order


def check(name: str, x: torch.Tensor, on: dtorch.DeviceMesh, where: tuple[object, ...]) -> None:
    draw = DRAWS[name]
    torch.manual_seed(11)
    want = [draw(x), torch.rand(3), draw(x)]
    d = spread(x, on, *where)
    torch.manual_seed(11)
    got = [draw(d), torch.rand(3, device=d.device), draw(d)]
    for g, w in zip(got, want, strict=True):
        (close if name in INEXACT else same)(g, w)


@pytest.mark.parametrize("name", DRAWS)
def test_bits_of_torch_on_any_mesh(name):
    x = torch.randn(7, 4)
    for on in (mesh(1), mesh(2), mesh(3), mesh(2, 2)):
        for where in ((R, R), (S0, R), (S1, S0), (S0, S0), (P, R)):
            check(name, x, on, where[: on.ndim])
    big = torch.randn(5, 40)  # torch draws in blocks from 16 on
    check(name, big, mesh(2), (S1,))


@pytest.mark.parametrize("mode", ["local"], indirect=True)
@pytest.mark.parametrize("name", ["normal_", "dropout", "randint_like", "multinomial", "shuffle", "in a view"])
def test_bits_of_torch_over_processes(mode, name):
    x = torch.randn(7, 4)
    for on in (mesh(1), mesh(3), mesh(2, 2)):
        check(name, x, on, (S0, S1)[: on.ndim])


@both_modes
def test_sixteen_devices(mode):
    torch.manual_seed(0)
    want = torch.randn(33, 5)
    for on, where in ((mesh(16), (S0,)), (mesh(4, 4), (S1, S0)), (mesh(2, 2, 4), (R, S0, S1))):
        torch.manual_seed(0)
        same(dtorch.randn(33, 5, device_mesh=on, placements=where), want, where)


@both_modes
def test_meshes_share_one_stream(mode):
    meshes = [mesh(2), mesh(1, first=3), mesh(3), mesh(2, first=2), mesh(1), mesh(2, 2)]
    torch.manual_seed(5)
    want = [torch.rand(3) for _ in range(18)]
    torch.manual_seed(5)
    got = [dtorch.rand(3, device_mesh=meshes[(i * 5) % 6], placements=[S0, R][: meshes[(i * 5) % 6].ndim]) for i in range(18)]
    for g, w in zip(got, want, strict=True):
        same(g, w)


@both_modes
def test_a_generator_of_the_device(mode):
    on = mesh(2)
    plain = torch.Generator().manual_seed(7)
    with on:
        ours = torch.Generator("dtorch").manual_seed(7)
    assert isinstance(ours, torch.Generator)
    assert ours.device.type == "dtorch"
    assert ours.initial_seed() == 7
    x = torch.randn(6, 4)
    d = spread(x, on, S0)
    for _ in range(2):
        same(torch.randn(4, 3, generator=ours, device=d.device), torch.randn(4, 3, generator=plain))
        same(dtorch.rand(5, generator=ours, device_mesh=on, placements=[S0]), torch.rand(5, generator=plain), [S0])
        same(d.clone().normal_(generator=ours), x.clone().normal_(generator=plain), [S0])
        same(torch.bernoulli(d.sigmoid(), generator=ours), torch.bernoulli(x.sigmoid(), generator=plain))
        same(torch.randperm(6, generator=ours, device=d.device), torch.randperm(6, generator=plain))
        same(torch.multinomial(d.abs(), 2, generator=ours), torch.multinomial(x.abs(), 2, generator=plain))
        same(torch.randint(0, 9, (4,), generator=ours, device=d.device), torch.randint(0, 9, (4,), generator=plain))
    state = ours.get_state()
    assert torch.equal(state, plain.get_state())
    first = full(torch.randn(3, generator=ours, device=d.device))
    ours.set_state(state)
    same(torch.randn(3, generator=ours, device=d.device), first)
    ours.manual_seed(7)
    plain.manual_seed(7)
    same(torch.rand(2, generator=ours, device=d.device), torch.rand(2, generator=plain))
    assert ours.seed() == ours.initial_seed()


@both_modes
def test_generators_are_independent(mode):
    on = mesh(2)
    a, b = dtorch.Generator("dtorch").manual_seed(1), dtorch.Generator("dtorch").manual_seed(1)
    torch.manual_seed(1)
    first = [full(dtorch.rand(3, generator=g, device_mesh=on)) for g in (a, None, a, b, None, b)]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[3])
    assert torch.equal(first[2], first[4])
    assert torch.equal(first[2], first[5])
    assert not torch.equal(first[0], first[2])


@both_modes
def test_a_cpu_generator_is_advanced_as_by_plain_torch(mode):
    on = mesh(2)
    plain, given = torch.Generator().manual_seed(3), torch.Generator("cpu").manual_seed(3)
    x = torch.randn(4, 3)
    d = spread(x, on, S0)
    for _ in range(2):
        same(torch.randn(4, 3, generator=given, device=d.device), torch.randn(4, 3, generator=plain))
        same(dtorch.randn(4, 3, generator=given, device_mesh=on, placements=[S1]), torch.randn(4, 3, generator=plain), [S1])
        same(d.clone().normal_(generator=given), x.clone().normal_(generator=plain), [S0])
        same(d.clone().uniform_(generator=given), x.clone().uniform_(generator=plain))
        same(torch.multinomial(d.abs(), 1, generator=given), torch.multinomial(x.abs(), 1, generator=plain))
        same(torch.bernoulli(d.sigmoid(), generator=given), torch.bernoulli(x.sigmoid(), generator=plain))
        same(torch.normal(d, 1.0, generator=given), torch.normal(x, 1.0, generator=plain))
    assert torch.equal(given.get_state(), plain.get_state())
    from diffusers.utils.torch_utils import randn_tensor

    same(randn_tensor((2, 3), generator=given, device=d.device), torch.randn(2, 3, generator=plain))
    same(randn_tensor((2, 3), generator=[given, given], device=d.device), torch.cat([torch.randn(1, 3, generator=plain) for _ in range(2)]))


@both_modes
def test_state_of_the_default_generator(mode):
    on = mesh(2)
    torch.manual_seed(9)
    plain = torch.Generator().manual_seed(9)
    same(dtorch.rand(5, device_mesh=on), torch.rand(5, generator=plain))
    state = torch.dtorch.get_rng_state()
    assert torch.equal(state, plain.get_state())
    first = [full(dtorch.randn(3, device_mesh=m)) for m in (on, mesh(3), on)]
    torch.dtorch.set_rng_state(state)
    for m, w in zip((mesh(1), on, mesh(3)), first, strict=True):
        same(dtorch.randn(3, device_mesh=m), w)
    with torch.random.fork_rng(devices=[0], device_type="dtorch"):
        dtorch.rand(7, device_mesh=on)
    torch.dtorch.set_rng_state(state)
    with torch.random.fork_rng(devices=[0], device_type="dtorch"):
        dtorch.rand(7, device_mesh=on)
    same(dtorch.randn(3, device_mesh=on), first[0])
    assert torch.dtorch.initial_seed() == 9
    torch.dtorch.manual_seed(4)
    a = full(dtorch.rand(2, device_mesh=on))
    torch.dtorch.manual_seed_all(4)
    same(dtorch.rand(2, device_mesh=on), a)


@both_modes
def test_what_is_no_state_is_refused_at_once(mode):
    for state, pattern in ((torch.zeros(7, dtype=torch.uint8), "state size to be 7"), (torch.zeros(5056, dtype=torch.uint8), "mt19937")):
        with pytest.raises(RuntimeError, match=pattern):
            torch.dtorch.set_rng_state(state)
        with pytest.raises(RuntimeError, match=pattern):
            torch.Generator("dtorch").set_state(state)
    assert dtorch.rand(3, device_mesh=mesh(2)).to_torch().shape == (3,)


def test_seeding_before_the_first_use(mode):
    dtorch.shutdown()
    torch.manual_seed(123)
    want = torch.rand(4)
    torch.manual_seed(123)
    dtorch.init(mode="inline")
    same(dtorch.rand(4), want)


def test_the_host_generator_is_left_alone():
    torch.manual_seed(2)
    want = torch.rand(3)
    torch.manual_seed(2)
    dtorch.rand(100)
    dtorch.nn.functional.dropout(dtorch.ones(50), 0.5)
    assert torch.equal(torch.rand(3), want)


@local_mode
def test_workers_that_join_late_continue_the_stream(mode):
    graph = dtorch.Graph(mode="local", workers=2, threads=1)
    with graph:
        torch.manual_seed(6)
        plain = torch.Generator().manual_seed(6)
        same(dtorch.rand(3, device_mesh=mesh(1)), torch.rand(3, generator=plain))
        same(dtorch.rand(3, device_mesh=mesh(2), placements=[S0]), torch.rand(3, generator=plain))
        same(dtorch.rand(3, device_mesh=mesh(1, first=1)), torch.rand(3, generator=plain))
    graph.close()


@both_modes
def test_dropout_in_training(mode):
    x = torch.randn(6, 8)
    for where in ((R,), (S0,), (S1,)):
        a, b = x.clone().requires_grad_(), spread(x, mesh(2), *where).requires_grad_()
        for t in (a, b):
            torch.manual_seed(8)
            torch.nn.functional.dropout(t * 2, 0.3).sum().backward()
        same(b.grad, a.grad, where)
    net = torch.nn.Dropout(0.5)
    d = spread(x, mesh(2), S0)
    same(net.eval()(d), x, [S0])
    assert ((full(net.train()(d)) == 0).float().mean() - 0.5).abs() < 0.3


def test_default_generator_survives_every_placement_of_layouts():
    torch.manual_seed(1)
    want = [torch.randn(5, 3) for _ in range(4)]
    torch.manual_seed(1)
    for where, w in zip(layouts(2, mesh(2)), want, strict=True):
        same(dtorch.randn(5, 3, device_mesh=mesh(2), placements=where), w, where)
