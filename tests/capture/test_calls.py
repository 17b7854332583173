"""Which calls are replayed, and that a replay is what the call would have been."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Partial, Replicate, Shard
from tests.engine.helpers import S0, S1, R, both_modes, full, mesh, spread

pytestmark = [both_modes, pytest.mark.filterwarnings("error")]


def replayed(f: Any, replays: int, recordings: int = 2) -> None:
    assert (f.replays, f.recordings, f.refusals) == (replays, recordings, [])


def test_replays_are_the_calls(mode):
    on = mesh(1)
    w = spread(torch.randn(8, 8), on)

    @dtorch.capture
    def f(x, scale, *, shift=None):
        y = (x @ w).relu() * scale
        return {"y": y if shift is None else y + shift, "views": [y.t(), y[:2]], "text": "done", "x": x}

    for i in range(5):
        x, shift = torch.randn(4, 8), torch.randn(8)
        got = f(spread(x, on), 0.5, shift=spread(shift, on))
        y = (x @ full(w)).relu() * 0.5
        assert torch.equal(full(got["y"]), y + shift)
        assert [full(v).tolist() for v in got["views"]] == [y.t().tolist(), y[:2].tolist()]
        assert got["views"][0].stride() == y.t().stride()
        assert got["text"] == "done" and torch.equal(full(got["x"]), x)
        assert i < 4 or f.replays == 3
    replayed(f, 3)
    assert torch.equal(full(f(spread(x, on), 0.25)["y"]), (x @ full(w)).relu() * 0.25)
    assert f.recordings == 3


def test_kinds_of_calls(mode):
    on = mesh(2)
    f = dtorch.capture(lambda x, n=1: torch.zeros_like(x) + x.dtype.itemsize + n)
    values = [torch.ones(4, dtype=torch.float64), torch.ones(4, 1)]
    kinds = [(v, p, n) for v in values for p in (R, S0) for n in (1, 1.0, True)]
    for _ in range(4):
        for v, p, n in kinds:
            got = f(spread(v, on, p), n)
            assert torch.equal(full(got), torch.zeros_like(v) + v.dtype.itemsize + n)
            assert got.placements == (p,)
    # With as many kinds that are used in turn, each is recorded by itself.
    assert f.recordings == 2 * len(kinds) and f.replays == 2 * len(kinds)


def test_modes_of_torch(mode):
    on = mesh(1)
    x = spread(torch.randn(3, 3), on)
    f = dtorch.capture(lambda x: x @ x)
    for _ in range(4):
        assert f(x).dtype == torch.float32
        with torch.autocast("dtorch", dtype=torch.bfloat16):
            assert f(x).dtype == torch.bfloat16
        with torch.inference_mode():
            assert f(x).is_inference()
        assert not f(x).is_inference()


def test_the_same_argument_twice(mode):
    on = mesh(1)
    f = dtorch.capture(lambda a, b: a.add_(1) + b)
    for _ in range(4):
        a, b = spread(torch.ones(3), on), spread(torch.ones(3), on)
        assert full(f(a, b)).tolist() == [3.0] * 3
        assert full(f(a, a)).tolist() == [6.0] * 3
        assert full(a).tolist() == [3.0] * 3
    replayed(f, 4, 4)


def test_arguments_and_buffers_written_in_place(mode):
    on = mesh(2)
    buffer, want = spread(torch.zeros(4), on, S0), torch.zeros(4)
    whole = buffer.view(2, 2)

    @dtorch.capture
    def f(x):
        buffer.add_(x)
        x[1:3] = 0
        return buffer * 2

    for _ in range(5):
        value = torch.randn(4)
        x = spread(value, on)
        got = f(x)
        want += value
        value[1:3] = 0
        assert torch.equal(full(got), want * 2)
        assert torch.equal(full(buffer), want)
        assert torch.equal(full(whole), want.view(2, 2))
        assert torch.equal(full(x), value)
        buffer.mul_(2)
        want.mul_(2)
    replayed(f, 3)


def test_results_share_memory_with_what_they_view(mode):
    on = mesh(1)
    buffer = spread(torch.zeros(2, 3), on)
    f = dtorch.capture(lambda x: (x[0], buffer.t(), (x + 1).view(3, 2)))
    for _ in range(4):
        x = spread(torch.zeros(2, 3), on)
        row, turned, own = f(x)
        row.fill_(5)
        turned[0, 0] = own.sum()
        assert full(x).tolist() == [[5.0] * 3, [0.0] * 3]
        assert float(buffer[0, 0]) == 6.0
        own.add_(1)  # its memory is its own
        assert full(f(x)[2]).tolist() == [[6.0, 6.0], [6.0, 1.0], [1.0, 1.0]]


def test_constants_of_a_record_stay_as_they_are(mode):
    on = mesh(1)

    def f(x):
        steps = torch.arange(4, device=x.device)
        steps.add_(1)
        zeros = torch.zeros(4, device=x.device)
        return x * steps, zeros, torch.ones(4, device=x.device).cumsum(0)

    g = dtorch.capture(f)
    for _ in range(4):
        y, zeros, sums = g(spread(torch.ones(4), on))
        assert full(y).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert full(zeros).tolist() == [0.0] * 4 and full(sums).tolist() == [1.0, 2.0, 3.0, 4.0]
        zeros.add_(7)
        sums.add_(7)
    replayed(g, 2)


def test_results_of_constants_share_memory_among_themselves(mode):
    on = mesh(1)

    def f(x):
        row = torch.arange(3, device=x.device)
        return row, row.view(3, 1), x + row

    g = dtorch.capture(f)
    for _ in range(4):
        row, column, total = g(spread(torch.zeros(3), on))
        column.add_(1)
        assert full(row).tolist() == [1, 2, 3] and full(total).tolist() == [0.0, 1.0, 2.0]
    replayed(g, 2)


def test_a_partial_argument_is_reduced_once(mode):
    on = mesh(2)
    f = dtorch.capture(lambda x: x.relu() + x)
    a, b = torch.randn(3, 4), torch.randn(4, 3)
    for _ in range(4):
        x = spread(a, on, S1) @ spread(b, on, S0)
        assert x.placements == (Partial(),)
        y = f(x)
        assert x.placements == (Replicate(),)
        torch.testing.assert_close(full(y), (a @ b).relu() + a @ b)
        torch.testing.assert_close(full(x), a @ b)
    replayed(f, 2)


def test_two_meshes_in_one_record(mode):
    first, second = mesh(2), mesh(1, first=1)
    w = spread(torch.randn(4, 4), first, S1)
    v = spread(torch.randn(4, 4), second)

    @dtorch.capture
    def f(x):
        y = (x @ w).redistribute(second, [Replicate()])
        z = (y @ v).relu() + torch.rand(4, device=v.device)
        return z, (z + 1).redistribute(first, [Shard(0)]), torch.rand(2, device=x.device)

    def plain(x):
        z = (x @ full(w) @ full(v)).relu() + torch.rand(4)
        return z, z + 1, torch.rand(2)

    torch.manual_seed(4)
    values = [torch.randn(4, 4) for _ in range(5)]
    torch.manual_seed(5)
    want = [plain(x) for x in values]
    torch.manual_seed(5)
    for x, expected in zip(values, want, strict=True):
        got = f(spread(x, first, S0))
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(full(g), e)
        assert got[0].device_mesh == second and got[1].placements == (Shard(0),)
    assert f.replays >= 1 and not f.refusals


@pytest.mark.parametrize("placement", [R, S0])
def test_random_numbers_are_those_of_the_calls(mode, placement):
    on = mesh(2)
    f = dtorch.capture(lambda x: F.dropout(x, 0.5) + torch.rand_like(x))
    torch.manual_seed(1)
    values = [torch.randn(4, 4) for _ in range(7)]
    torch.manual_seed(2)
    want = [F.dropout(x, 0.5) + torch.rand_like(x) for x in values[:6]]
    torch.manual_seed(2)
    for i, (x, expected) in enumerate(zip(values, want, strict=False)):
        assert torch.equal(full(f(spread(x, on, placement))), expected), i
        if i == 3:  # draws between, and a state taken and put back
            state = torch.dtorch.get_rng_state()
            torch.rand(3, device="dtorch")
            torch.dtorch.set_rng_state(state)
    torch.manual_seed(2)
    assert torch.equal(full(f(spread(values[0], on, placement))), want[0])
    assert f.replays >= 3


def test_a_generator_that_is_seeded_between(mode):
    on = mesh(1)
    g = torch.Generator(device="dtorch")
    f = dtorch.capture(lambda x: x + torch.randn(3, generator=g, device=x.device))
    for i in range(5):
        g.manual_seed(i)
        want = torch.randn(3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(full(f(spread(torch.zeros(3), on))), want)
    replayed(f, 3)


def test_as_decorator_of_a_method(mode):
    on = mesh(1)

    class Model(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        @dtorch.capture
        def forward(self, x):
            return x * self.factor

    two, three = Model(2.0), Model(3.0)
    for _ in range(4):
        assert full(two(spread(torch.ones(2), on))).tolist() == [2.0, 2.0]
        assert full(three(spread(torch.ones(2), on))).tolist() == [3.0, 3.0]
    assert Model.forward.replays == 4


def test_one_capture_within_another(mode):
    on = mesh(1)
    inner = dtorch.capture(lambda x: x + 1)
    outer = dtorch.capture(lambda x: inner(x) * 2)
    for _ in range(4):
        assert full(outer(spread(torch.ones(2), on))).tolist() == [4.0, 4.0]
    replayed(outer, 2)


def test_a_failure_names_the_line_and_spares_the_rest(mode):
    on = mesh(1)

    @dtorch.capture
    def f(rows, x):
        good = x + 1
        bad = F.embedding(rows, x)
        return good, bad, bad + 1, good * 2

    line = f.captured_function.__code__.co_firstlineno + 3
    x = torch.eye(2)
    right, wrong = torch.tensor([1, 0]), torch.tensor([1, 2])
    for _ in range(3):
        assert torch.equal(full(f(spread(right, on), spread(x, on))[2]), x[right] + 1)
    results = f(spread(wrong, on), spread(x, on))
    assert f.replays == 2
    with pytest.raises(dtorch.RemoteError, match=rf"embedding.*test_calls\.py:{line}.*index out of range"):
        full(results[2])
    with pytest.raises(dtorch.RemoteError, match="never made"):
        full(results[1])
    assert torch.equal(full(results[0]), x + 1)
    assert torch.equal(full(results[3]), (x + 1) * 2)
    lost = f(spread(right, on), results[1])
    with pytest.raises(dtorch.RemoteError, match="never made"):
        full(lost[3])
    assert torch.equal(full(f(spread(right, on), spread(x, on))[2]), x[right] + 1)


def test_a_failure_on_one_device_leaves_no_peer_waiting(mode):
    on = mesh(2)
    table = torch.randn(3, 4)
    w = spread(table, on)

    @dtorch.capture
    def f(rows):
        total = F.embedding(rows, w).sum()
        return total + 1, (rows.redistribute(placements=[Replicate()]) + 1)

    right, wrong = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 9])
    for rows in (right, right, right, wrong, right, wrong, right):
        total, more = f(spread(rows, on, S0))
        if rows is wrong:
            with pytest.raises(dtorch.RemoteError, match="embedding"):
                full(total)
        else:
            torch.testing.assert_close(full(total), table[rows].sum() + 1)
        assert torch.equal(full(more), rows + 1)
    replayed(f, 5)


def test_threads(mode):
    on = mesh(1)
    f = dtorch.capture(lambda x: (x @ x).relu() + x)
    x = torch.randn(4, 4)
    want, wrong = (x @ x).relu() + x, []

    def work() -> None:
        wrong.extend(i for i in range(20) if not torch.equal(full(f(spread(x, on))), want))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dtorch.CaptureWarning)  # threads that come between a recording
        threads = [threading.Thread(target=work) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert not wrong


def test_a_check_without_result_is_made_in_every_replay(mode):
    on = mesh(1)
    f = dtorch.capture(lambda m: torch.linalg.cholesky(m))
    for _ in range(3):
        f(spread(torch.eye(2), on))
    f(spread(-torch.eye(2), on))
    assert f.replays == 2
    with pytest.raises(dtorch.RemoteError, match=r"not positive-definite"):
        dtorch.synchronize()


def test_a_worker_that_joins_later_knows_the_records(mode):
    on = mesh(1)
    f = dtorch.capture(lambda x: x + 1)
    for _ in range(3):
        f(spread(torch.ones(2), on))
    both = spread(torch.ones(4), mesh(2), S0)
    assert full(f(spread(torch.ones(2), on))).tolist() == [2.0, 2.0]
    assert full(both + 1).tolist() == [2.0] * 4
    assert f.replays == 2


def test_records_are_forgotten(mode):
    on = mesh(1)
    session = spread(torch.ones(1), on)._h.session
    before = len(session.records)
    f = dtorch.capture(lambda x: x + 1)
    for _ in range(3):
        f(spread(torch.ones(2), on))
    assert len(session.records) == before + 1
    del f
    assert len(session.records) == before


def test_nothing_is_kept_on_the_workers(mode):
    on = mesh(1)
    session = spread(torch.ones(1), on)._h.session
    f = dtorch.capture(lambda x: [x.t() + i for i in range(3)])
    sent: list[int] = []
    for _ in range(6):
        results = f(spread(torch.ones(2, 2), on))
        sent.extend(t._h.id for t in results)
        del results
    freed = session.buf
    dtorch.synchronize()
    if mode == "inline":
        store = session.link._executor.store
        assert not store.keys() & set(sent)
        assert all(isinstance(k, int) and k < 1 << 61 for k in store)
    assert freed is session.buf
