"""Where torch treats a device of its own kind otherwise than the CPU or CUDA: each of these once broke a program."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch.client import graph
from tests.engine.helpers import S0, both_modes, full, mesh, same, spread


# -- autograd ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", [0, 1])
def test_backward_runs_on_the_calling_thread(which: int) -> None:
    on = [mesh(1), mesh(2)][which]
    first, x = spread(torch.ones(1), mesh(1)), spread(torch.ones(3), on).requires_grad_()
    seen = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(threading.get_ident()))
    y.sum().backward()
    assert seen == [threading.get_ident()]
    assert first.device.index != x.device.index or which == 0
    same(x.grad, torch.full((3,), 2.0))


DECOMPOSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "mish": F.mish,
    "channel_shuffle": lambda x: F.channel_shuffle(x.view(1, 4, 8, 2), 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DECOMPOSED)
def test_derivatives_that_torch_writes_out_elsewhere(name: str, dtype: torch.dtype) -> None:
    """Composed of other operators they round differently."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, there = x.clone().requires_grad_(), spread(x, mesh(1)).requires_grad_()
    weights = torch.linspace(-3, 3, 64).to(dtype)
    for leaf, w in ((plain, weights), (there, spread(weights, mesh(1)))):
        out = DECOMPOSED[name](leaf)
        (out.reshape(-1) * w).sum().backward()
    same(there.grad, plain.grad)


def test_derivative_that_is_zero_for_certain() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    plain, there = x.clone().requires_grad_(), spread(x, mesh(2), S0).requires_grad_()
    for leaf in (plain, there):
        leaf.sgn().abs().sum().backward()
        torch.autograd.grad(leaf.real.sign().sum(), leaf)
    same(there.grad, plain.grad)


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": torch.rand(5, 5) > 0.4},
    "bias": {"attn_mask": torch.randn(5, 5)}, "shared heads": {"enable_gqa": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_the_fused_kernel(name: str, dtype: torch.dtype) -> None:
    """In every gradient mode; written out, it would be other bits and sixty operators."""
    options = dict(ATTENTION[name])
    torch.manual_seed(0)
    heads = 2 if "enable_gqa" in options else 4
    values = [torch.randn(2, h, 5, 8, dtype=dtype) for h in (4, heads, heads)]
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    on = mesh(1)
    there, mask_there = [spread(v, on) for v in values], None if mask is None else spread(mask, on)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            want = F.scaled_dot_product_attention(*values, attn_mask=mask, **options)
            got = F.scaled_dot_product_attention(*there, attn_mask=mask_there, **options)
            same(got, want)
            assert got.stride() == want.stride()
    for group in (values, there):
        for v in group:
            v.requires_grad_()
    want = F.scaled_dot_product_attention(*values, attn_mask=mask, **options)
    got = F.scaled_dot_product_attention(*there, attn_mask=mask_there, **options)
    same(got, want)
    want.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(there, values, strict=True):
        same(a.grad, b.grad)


# -- modules and optimizers --------------------------------------------------------------------------------------------
def test_an_optimizer_made_before_the_move_keeps_its_parameters() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    weight = model.weight
    model(torch.ones(1, 3)).sum()  # the graph of an earlier run, which has ended
    with mesh(1):
        model.to("dtorch")
    assert weight is model.weight
    assert optimizers[1].param_groups[0]["params"][0] is model.weight
    for m, optimizer, x in zip(
        (plain, model), optimizers, (torch.ones(4, 3), torch.ones(4, 3).to("dtorch")), strict=True
    ):
        m(x.to(m.weight.device)).sum().backward()
        optimizer.step()
    same(model.weight, plain.weight.detach())


def test_a_graph_from_before_the_move_may_be_alive() -> None:
    model = nn.Linear(3, 2)
    before = model(torch.ones(1, 3)).sum()
    with mesh(1):
        model.to("dtorch")
    assert model.weight.device.type == "dtorch"
    assert before.grad_fn is not None


@pytest.mark.parametrize(("make", "most"), [
    (lambda p: torch.optim.AdamW(p, lr=0.1), 14), (lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), 4),
    (lambda p: torch.optim.SGD(p, lr=0.1), 2),
], ids=["AdamW", "fused", "SGD"])  # fmt: skip
def test_optimizers_take_all_parameters_in_one_operator(make: Any, most: int) -> None:
    params = [nn.Parameter(spread(torch.ones(3), mesh(1))) for _ in range(20)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = make(params)
    optimizer.step()
    report = dtorch.explain(optimizer.step, quiet=True)
    assert 0 < len(report.lines) <= most
    clip = dtorch.explain(lambda: nn.utils.clip_grad_norm_(params, 1.0), quiet=True)
    assert 0 < len(clip.lines) < 20


def test_autocast_has_a_type_by_default() -> None:
    assert torch.get_autocast_dtype("dtorch") == torch.float16
    assert torch.bfloat16 in torch.dtorch.get_amp_supported_dtype()
    x = spread(torch.ones(2, 2), mesh(1))
    with torch.autocast("dtorch"):
        assert (x @ x).dtype == torch.float16
        assert (x @ x).prod().dtype == torch.float32
    assert (x @ x).dtype == torch.float32


# -- making tensors and moving them ------------------------------------------------------------------------------------
@both_modes
def test_host_data_becomes_tensors(mode: str) -> None:
    with mesh(2), torch.inference_mode(mode == "inline"):
        x = torch.tensor([[1.5, 2], [3, 4]], device="dtorch")
        same(x, torch.tensor([[1.5, 2], [3, 4]]))
        same(torch.asarray(np.arange(3.0), device="dtorch"), torch.arange(3.0, dtype=torch.float64))
        same(x[[1, 0]], torch.tensor([[3.0, 4], [1.5, 2]]))
        same(x[np.array([1])], torch.tensor([[3.0, 4]]))
        same(x[:, torch.tensor([True, False])], torch.tensor([[1.5], [3]]))
        same(torch.triu_indices(3, 4, device="dtorch"), torch.triu_indices(3, 4))


def test_complex_values_keep_their_bits() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    d = spread(x, mesh(1))
    for f in (
        torch.fft.hfft2,
        torch.fft.hfftn,
        torch.fft.ihfft2,
        lambda t: t.conj().t() @ t,
        lambda t: t.conj().imag + 1,
    ):
        given = (x, d) if f is not torch.fft.ihfft2 else (x.real, d.real)
        same(f(given[1]), f(given[0]))


def test_moves_to_meta() -> None:
    d = spread(torch.ones(2, 3), mesh(1))
    for t in (d.to("meta"), torch.empty_like(d, device="meta"), d.new_zeros(2, 3, device="meta")):
        assert (t.device.type, t.shape) == ("meta", (2, 3))
    assert copy.deepcopy(nn.Linear(2, 2)).to("meta").to_empty(device=d.device).weight.device == d.device


def test_storages_without_values_are_refused() -> None:
    for size in ((), (8,)):
        with pytest.raises(RuntimeError, match=r"no bytes in this process: make a tensor instead"):
            torch.UntypedStorage(*size, device="dtorch")


@pytest.mark.parametrize("weights_only", [True, False])
def test_plain_files_load_onto_a_mesh(weights_only: bool) -> None:
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0).view(2, 3), "n": 3}, file)
    file.seek(0)
    with mesh(2):
        loaded = torch.load(file, map_location="dtorch", weights_only=weights_only)
    same(loaded["a"], torch.arange(6.0).view(2, 3))
    assert loaded["n"] == 3


def test_torchs_own_checkpoints_of_plain_tensors(tmp_path) -> None:
    from torch.distributed import checkpoint

    d, plain = spread(torch.ones(3), mesh(2)), {"a": torch.randn(2, 3)}  # the device is in use
    loaded = {"a": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.save(plain, checkpoint_id=tmp_path, no_dist=True)
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["a"], plain["a"])
    same(d + 1, torch.full((3,), 2.0))


# -- values on the host ------------------------------------------------------------------------------------------------
def test_numbers_in_text_and_arrays() -> None:
    d = spread(torch.tensor([1.25, -2]), mesh(2), S0)
    assert f"{d[0]:.3f} {d.sum():+.1f} {d.sum().item()}" == "1.250 -0.8 -0.75"
    assert f"{d}".startswith("DTensor([ 1.2500, -2.0000]")
    assert d.tolist() == [1.25, -2]
    assert np.asarray(d).tolist() == d.numpy(force=True).tolist() == [1.25, -2]
    assert [bool(v > 0) for v in d] == [True, False]
    assert (len(d), int(d[1]), float(d[0])) == (2, -2, 1.25)
    with pytest.raises((TypeError, ValueError), match="format"):
        f"{d:.3f}"


def test_what_the_device_module_offers() -> None:
    device = torch.get_device_module("dtorch")
    for name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state", "synchronize", "is_initialized",
                 "_is_in_bad_fork", "memory_allocated", "max_memory_allocated", "empty_cache", "mem_get_info",
                 "set_device", "device_count", "current_device", "is_available"):  # fmt: skip
        assert callable(getattr(device, name)), name
    assert not device._is_in_bad_fork()
    x = spread(torch.ones(2), mesh(1))
    assert x.share_memory_() is x
    with torch.random.fork_rng(devices=[x.device.index], device_type="dtorch"):
        torch.manual_seed(7)
        first = torch.rand(2, device=x.device)
    torch.manual_seed(7)
    same(torch.rand(2, device=x.device), full(first))


@pytest.mark.parametrize("name", ["item", "bool", "is_nonzero", "int"])
@pytest.mark.parametrize("inference", [False, True])
def test_each_read_is_one_read(name: str, inference: bool) -> None:
    read: Callable[[Any], Any] = {
        "item": lambda t: t.item(), "bool": bool, "is_nonzero": torch.is_nonzero, "int": int,
    }[name]  # fmt: skip
    with torch.inference_mode(inference):
        x = torch.rand(30, device=spread(torch.ones(1), mesh(1)).device).sum() + 1  # made there: no copy of it is here
        before = graph.current_session().reads
        assert read(x) > 0
        assert graph.current_session().reads == before + 1


# -- lifetime ----------------------------------------------------------------------------------------------------------
@both_modes
@pytest.mark.parametrize("inference", [False, True])
def test_a_view_outlives_what_it_was_taken_of(inference: bool, mode: str) -> None:
    with torch.inference_mode(inference):
        base = spread(torch.arange(6.0), mesh(2), S0)
        views = [base[2:], base.detach(), base.view(2, 3).t(), base.unflatten(0, (3, 2))]
        base.add_(1)
        del base
        gc.collect()
        want = torch.arange(1.0, 7)
        for got, expected in zip(views, (want[2:], want, want.view(2, 3).t(), want.view(3, 2)), strict=True):
            same(got, expected)


def test_saved_values_live_until_backward() -> None:
    x = spread(torch.full((3,), 2.0), mesh(1)).requires_grad_()
    y = x * 1
    loss = (y * y).sum()
    del y
    gc.collect()
    loss.backward()
    same(x.grad, torch.full((3,), 4.0))


COMPOSITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda x: F.linear(x, x[:2], x[0, :2]),
    "matmul": lambda x: x @ x.t(),
    "reshape a view": lambda x: x.reshape(2, 12),
    "reshape a copy": lambda x: x.t().reshape(24),
    "to": lambda x: x.to(torch.float64),
    "to itself": lambda x: x.to(torch.float32),
    "contiguous": lambda x: x.t().contiguous(),
    "flatten": lambda x: x.view(2, 3, 4).flatten(1),
    "expand_as": lambda x: x[:1].expand_as(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "chunk": lambda x: x.chunk(2)[1],
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_operators_in_inference_mode(name: str) -> None:
    """They arrive whole there; whether the result is the argument, a view of it or a copy is as in torch."""
    x = torch.randn(6, 4)
    d = spread(x, mesh(1))
    with torch.inference_mode():
        got, want = COMPOSITES[name](d), COMPOSITES[name](x)
        same(got, want)
        assert got.stride() == want.stride()
        assert (got is d) == (want is x)
        x.add_(1)
        d.add_(1)
        same(got, want)
