"""Captured operators in a row as one compiled function."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch.worker import fused
from tests.engine.helpers import full, mesh, spread
from tests.transport.processes import wait_until

Compile = Callable[[Callable[..., Any], Any], Callable[..., Any]]


class Compiler:
    """In place of the real one, or around it: what it has compiled, and how often that ran."""

    def __init__(self, compile_function: Compile) -> None:
        self._compile_function = compile_function
        self.calls = 0

    def __call__(self, function: Callable[..., Any], examples: Any) -> Callable[..., Any]:
        compiled = self._compile_function(function, examples)

        def run(*inputs: torch.Tensor) -> Any:
            self.calls += 1
            return compiled(*inputs)

        return run


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    found = Compiler(getattr(request, "param", lambda function, examples: function))
    monkeypatch.setattr(fused, "compile_function", found)
    return found


def settled() -> bool:
    """Whether nothing is being compiled."""
    return wait_until(lambda: not any(t.name == "dtorch-compile" for t in threading.enumerate()), 120)


def block(x: Any, w: Any) -> Any:
    h = (x @ w).sin()
    return torch.nn.functional.layer_norm(h * 2 + x, (4,)).cos() + h


@pytest.mark.parametrize("compiler", [fused.compile_function], indirect=True, ids=["inductor"])
def test_values(compiler: Compiler) -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 4)
    a, b = spread(x, mesh(1)), spread(w, mesh(1))
    captured = dtorch.capture(block, compile=True)
    for _ in range(4):
        torch.testing.assert_close(full(captured(a, b)), block(x, w))
    assert settled()
    for k in range(2):
        torch.testing.assert_close(full(captured(a + k, b)), block(x + k, w))
    assert compiler.calls == 2
    assert captured.compile


def test_views_and_writes(compiler: Compiler) -> None:
    x = torch.randn(6, 4)
    a = spread(x, mesh(1))

    def views(x: Any) -> tuple[Any, Any]:
        y = x.exp()
        rows, column = x.t(), y[:, 1].view(2, 3)
        x.add_(1)
        return rows, (column * 2 + 1).sin().cos() + y.sum()

    captured = dtorch.capture(views, compile=True)
    for _ in range(6):
        got, want = captured(a), views(x)
        torch.testing.assert_close(full(got[0]), want[0])
        torch.testing.assert_close(full(got[1]), want[1])
        got[0].mul_(0.5)
        want[0].mul_(0.5)
        torch.testing.assert_close(full(a), x)
        assert settled()
    assert compiler.calls


def test_a_failure_names_its_operator(compiler: Compiler) -> None:
    table = torch.randn(5, 4)

    def pick(x: Any, i: Any) -> Any:
        return (x.sin().cos()[i] * 2 + 1).exp()

    captured = dtorch.capture(pick, compile=True)
    a = spread(table, mesh(1))
    for _ in range(4):
        torch.testing.assert_close(full(captured(a, spread(torch.tensor([1, 2]), mesh(1)))), pick(table, torch.tensor([1, 2])))
        assert settled()
    assert compiler.calls
    with pytest.raises(IndexError, match=r"aten\.index.*test_compiled\.py"):
        captured(a, spread(torch.tensor([1, 9]), mesh(1))).to_torch()
    torch.testing.assert_close(full(captured(a, spread(torch.tensor([0, 4]), mesh(1)))), pick(table, torch.tensor([0, 4])))


def refuse(function: Callable[..., Any], examples: Any) -> Callable[..., Any]:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("compiler", [refuse], indirect=True)
def test_what_cannot_be_compiled(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 4)
    captured = dtorch.capture(block, compile=True)
    with caplog.at_level(logging.WARNING, "dtorch"):
        for _ in range(5):
            assert torch.equal(full(captured(spread(x, mesh(1)), spread(w, mesh(1)))), block(x, w))
            assert settled()
    assert [r.message for r in caplog.records] == [
        "A captured part runs operator by operator; it cannot be compiled: no compiler here"
    ]
