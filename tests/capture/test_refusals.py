"""What no record can hold is noticed, said once with its line, and runs as it is: never a stale result."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

import dtorch
from tests.engine.helpers import both_modes, full, mesh, spread

pytestmark = [both_modes, pytest.mark.filterwarnings("error")]


class Counter:
    def __init__(self) -> None:
        self.count = 0


COUNTER = Counter()


def reads(x, k):
    return x * float(x.sum())


def chooses(x, k):
    return x + 1 if x.sum() > 5 else x - 1


def finds(x, k):
    return x[x > 1]


def counts(x, k):
    COUNTER.count += 1
    return x * 1


def draws_in_python(x, k):
    return x + 1 if random.random() < 2 else x


def draws_in_numpy(x, k):
    return x + int(numpy.random.rand() < 2)


def draws_on_the_host(x, k):
    torch.rand(1)
    return x + 1


def seeds(x, k):
    torch.manual_seed(3)
    return x + torch.rand(2, device=x.device)


REASONS = {
    reads: ("reads a value", 1), chooses: ("reads a value", 1), finds: ("shape of a result|reads a value", 1),
    counts: ("the call itself changes COUNTER.count (0 became 1)|changes COUNTER.count", 0),
    draws_in_python: ("random numbers in this process", 0), draws_in_numpy: ("random numbers in this process", 0),
    draws_on_the_host: ("random numbers in this process", 0), seeds: ("seeds a generator", 2),
}  # fmt: skip


@pytest.mark.parametrize("function", REASONS)
def test_is_refused(mode, function):
    on = mesh(1)
    f = dtorch.capture(function)
    with pytest.warns(dtorch.CaptureWarning) as warned:  # noqa: PT031
        for i in range(5):
            value = torch.full((2, 2), float(i))  # of two dimensions: no copy on the host tells its value
            torch.manual_seed(9)
            want = function(value, [2])
            torch.manual_seed(9)
            assert torch.equal(full(f(spread(value, on), [2])), want)
    assert f.replays == 0 and f.recordings == 2
    reason, line = REASONS[function]
    (only,) = warned
    assert only.filename == __file__
    text = str(only.message)
    assert function.__name__ in text and any(part in text for part in reason.split("|")), text
    if line:
        assert only.lineno == function.__code__.co_firstlineno + line


def test_numbers_from_elsewhere(mode):
    on = mesh(1)

    def number(x):
        return x * next(numbers)

    def tensor(x):
        return x * torch.full((2,), next(numbers)).to(x.device)

    for function, reason in ((number, "a number differs from call to call"), (tensor, "uploads a plain tensor whose values differ")):
        numbers = iter(range(1, 20))
        f = dtorch.capture(function)
        with pytest.warns(dtorch.CaptureWarning, match=reason) as warned:  # noqa: PT031
            for i in range(1, 7):
                assert full(f(spread(torch.ones(2), on))).tolist() == [float(i)] * 2
        assert f.replays == 0
        assert warned[0].lineno == function.__code__.co_firstlineno + 1


def test_a_tensor_kept_out_of_sight(mode):
    on = mesh(1)
    kept = {}
    kept["last"] = spread(torch.zeros(2), on)

    @dtorch.capture
    def f(x):
        kept["last"] = kept["last"] + x
        return kept["last"] * 2

    with pytest.warns(dtorch.CaptureWarning, match=r"the call itself changes kept\.last"):  # noqa: PT031
        for i in range(1, 6):
            assert full(f(spread(torch.ones(2), on))).tolist() == [2.0 * i] * 2
    assert f.replays == 0


def test_a_plain_argument(mode):
    on = mesh(1)
    w = spread(torch.eye(2), on)
    f = dtorch.capture(lambda x: x.to("dtorch") @ w)
    with pytest.warns(dtorch.CaptureWarning, match="an argument is a plain tensor"):  # noqa: PT031
        for i in range(4):
            assert full(f(torch.full((2, 2), float(i)))).tolist() == [[float(i)] * 2] * 2


def test_kinds_without_end(mode):
    on = mesh(1)
    f = dtorch.capture(lambda x: x + 1)
    with pytest.warns(dtorch.CaptureWarning, match="of another kind in almost every call"):  # noqa: PT031
        for n in range(1, 70):
            assert tuple(f(spread(torch.zeros(n), on)).shape) == (n,)
    assert f.recordings == 64
    assert not f._kinds


def test_state_that_never_rests(mode):
    on = mesh(1)
    scale = [1.0]
    f = dtorch.capture(lambda x: x * scale[0])
    with pytest.warns(dtorch.CaptureWarning, match=r"another in almost every call: scale"):  # noqa: PT031
        for i in range(14):
            scale[0] = 1.0 + i // 2
            assert full(f(spread(torch.ones(2), on))).tolist() == [scale[0]] * 2
    assert f.replays == 0


def test_an_error_of_the_call_is_the_callers(mode):
    on = mesh(1)

    @dtorch.capture
    def f(x):
        return x @ x

    for _ in range(3):
        with pytest.raises(RuntimeError, match="reduction dim"):
            f(spread(torch.ones(2, 3), on))
    assert spread(torch.ones(1), on)._h.session.recorder is None
    for _ in range(3):
        f(spread(torch.ones(3, 3), on))
    assert f.replays == 1
