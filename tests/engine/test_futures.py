"""``TensorFuture``: values on their way, several at once, with and without asyncio."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import dtorch
from dtorch.core.errors import RemoteError, SessionClosedError
from tests.engine.helpers import OPTIONS, S0, S1, P, both_modes, local_mode, mesh, spread

BUSY = torch.ones(1024, 1024) / 1024  # its square is itself, exactly


def slow(on: dtorch.DeviceMesh, rounds: int = 8) -> torch.Tensor:
    """A value that takes the workers a while."""
    x = spread(BUSY, on)
    for _ in range(rounds):
        x = x @ x
    return x


@both_modes
def test_get_wait_and_is_ready(mode):
    x = torch.randn(5, 3)
    for where in (S0, S1, P):
        d = spread(x, mesh(2), where)
        future = d.to_torch_async()
        assert isinstance(future, dtorch.TensorFuture)
        future.wait()
        assert future.is_ready()
        assert future.wait_for(0)
        value = future.get()
        assert type(value) is torch.Tensor
        assert torch.equal(value, x)
        assert future.get() is value


@local_mode
def test_it_does_not_wait(mode):
    x = slow(mesh(2))
    future = x.to_torch_async()
    assert not future.is_ready()
    assert future.wait_for(1) is False
    assert future.wait_for(60_000) is True
    assert future.is_ready()
    assert torch.equal(future.get(), BUSY)


@both_modes
def test_the_value_is_that_of_the_moment(mode):
    d = spread(torch.zeros(4), mesh(2), S0)
    before = d.to_torch_async()
    d.add_(1)
    after = d.to_torch_async()
    view = d[1:3].to_torch_async()
    d.mul_(5)
    del d
    assert before.get().tolist() == [0, 0, 0, 0]
    assert after.get().tolist() == [1, 1, 1, 1]
    assert view.get().tolist() == [1, 1]


@both_modes
def test_many_at_once_in_any_order(mode):
    d = spread(torch.arange(40.0), mesh(2), S0)
    futures = [(d * i).to_torch_async() for i in range(30)]
    for i in sorted(range(30), key=lambda i: (i * 7) % 30):
        assert torch.equal(futures[i].get(), torch.arange(40.0) * i)


@both_modes
def test_asyncio(mode):
    d = spread(torch.arange(6.0), mesh(2), S0)

    async def ask(i: int) -> torch.Tensor:
        return await (d * i).to_torch_async()

    async def main() -> list[torch.Tensor]:
        ready = d.to_torch_async()
        ready.wait()
        assert (await ready).tolist() == d.tolist()
        return list(await asyncio.gather(*(ask(i) for i in range(20))))

    for i, value in enumerate(asyncio.run(main())):
        assert torch.equal(value, torch.arange(6.0) * i)


@local_mode
def test_asyncio_goes_on_while_workers_compute(mode):
    async def main() -> int:
        future, turns = slow(mesh(2)).to_torch_async(), 0

        async def other() -> None:
            nonlocal turns
            while not future.is_ready():
                turns += 1
                await asyncio.sleep(0.001)

        _, value = await asyncio.gather(other(), asyncio.wait_for(_value(future), 60))
        assert torch.equal(value, BUSY)
        return turns

    assert asyncio.run(main()) > 3


async def _value(future: dtorch.TensorFuture) -> torch.Tensor:
    return await future


@local_mode
def test_asyncio_timeout_and_cancellation_leave_the_future_usable(mode):
    async def main() -> None:
        future = slow(mesh(2)).to_torch_async()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_value(future), 0.001)
        assert torch.equal(await future, BUSY)

    asyncio.run(main())


@both_modes
def test_failures_arrive_where_the_value_is_asked_for(mode):
    d = spread(torch.randn(4), mesh(2), S0)
    bad = d[torch.tensor([7])].to_torch_async()
    good = d.to_torch_async()

    async def main() -> None:
        with pytest.raises(IndexError, match="index 7"):
            await bad

    asyncio.run(main())
    assert torch.equal(good.get(), d.to_torch())
    assert bad.is_ready()
    with pytest.raises(RemoteError):
        bad.get()


@both_modes
def test_other_threads_wait(mode):
    d = spread(torch.arange(10.0), mesh(2), S0)
    futures = [(d + i).to_torch_async() for i in range(8)]
    found: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, futures[i].get())) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    for i in range(8):
        assert torch.equal(found[i], torch.arange(10.0) + i)


@local_mode
def test_the_end_of_the_session_ends_the_wait(mode):
    own = dtorch.Graph(**OPTIONS["local"])
    with own:
        future = slow(dtorch.DeviceMesh("cpu", [0, 1]), rounds=60).to_torch_async()
    closing = threading.Timer(0.1, own.close)
    closing.start()
    with pytest.raises(SessionClosedError, match="shut down"):
        future.get()
    closing.join()


def test_without_values(mode):
    on = mesh(2)
    for shape in ((), (0,), (3, 0)):
        future = dtorch.ones(shape, device_mesh=on).to_torch_async()
        assert torch.equal(future.get(), torch.ones(shape))
    x = spread(torch.tensor([1 + 2j, 3j]), on, S0).conj()
    assert torch.equal(x.to_torch_async().get(), torch.tensor([1 - 2j, -3j]))
    leaf = spread(torch.ones(3), on, S0).requires_grad_()
    assert not (leaf * 2).to_torch_async().get().requires_grad
