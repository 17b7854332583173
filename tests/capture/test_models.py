"""Models of transformers and diffusers, unmodified: a captured call gives the bits of the call, and of plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch.worker.record import Record
from tests.engine.helpers import both_modes, full, mesh, spread

pytestmark = [both_modes, pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error::dtorch.CaptureWarning")]


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ids(length: int = 7) -> torch.Tensor:
    return torch.randint(0, 64, (2, length))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_llama(mode, grad):
    plain = llama()
    with mesh(1):
        model = copy.deepcopy(plain).to("dtorch")
        f = dtorch.capture(model)
        with grad():
            for _ in range(5):
                x, mask = ids(), torch.ones(2, 7, dtype=torch.int64)
                got = f(input_ids=x.to("dtorch"), attention_mask=mask.to("dtorch"), use_cache=False)
                want = plain(input_ids=x, attention_mask=mask, use_cache=False)
                assert type(got) is type(want) and got.past_key_values is None
                assert torch.equal(full(got.logits), want.logits)
            assert f.replays == 3
            mask[0, :3] = 0  # padding: transformers looks at the mask
            for _ in range(4):
                got = f(input_ids=x.to("dtorch"), attention_mask=mask.to("dtorch"), use_cache=False)
                assert torch.equal(full(got.logits), plain(input_ids=x, attention_mask=mask, use_cache=False).logits)
    assert f.replays == 5 and not f.refusals


def decode(model: Any, tokens: torch.Tensor, steps: int, capture: bool) -> tuple[list[Any], Any]:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=32)
    logits = []

    def step(token: torch.Tensor) -> Any:
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]

    f = dtorch.capture(step) if capture else step
    with torch.no_grad():
        last = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        for _ in range(steps):
            token = last.argmax(-1, keepdim=True)
            last = f(token)
            logits.append(last)
    return logits, f


def test_decoding_with_a_static_cache(mode):
    plain, tokens = llama(), ids()
    want, _ = decode(plain, tokens, 10, False)
    with mesh(1):
        got, f = decode(copy.deepcopy(plain).to("dtorch"), tokens.to("dtorch"), 10, True)
        assert all(torch.equal(full(a), b) for a, b in zip(got, want, strict=True))
    assert f.replays >= 7 and not f.refusals


@pytest.mark.parametrize("plan", ["tp", "dp"])
def test_llama_on_two_devices(mode, plan):
    plain = llama()
    on = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=(plan,))
    model = dtorch.parallelize(copy.deepcopy(plain), on)
    f = dtorch.capture(model)
    with torch.no_grad():
        for i in range(5):
            x = ids()
            with on:
                got = f(input_ids=x.to("dtorch"), use_cache=False).logits
                again = model(input_ids=x.to("dtorch"), use_cache=False).logits
            assert got.placements == again.placements
            assert torch.equal(full(got), full(again)), i
            torch.testing.assert_close(full(got), plain(input_ids=x, use_cache=False).logits)
    assert f.replays == 3


def test_llama_training_on_two_devices(mode):
    on = dtorch.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    runs = []
    for capture in (False, True):
        model = dtorch.parallelize(llama().train(), on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(input_ids=x, labels=x, use_cache=False).loss
            loss.backward()
            optimizer.step()
            return loss

        f = dtorch.capture(step) if capture else step
        torch.manual_seed(3)
        with on:
            losses = [float(f(ids().to("dtorch")).detach()) for _ in range(6)]
        runs.append((losses, [full(p) for p in model.parameters()]))
    assert f.replays >= 2 and not f.refusals
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_sd3_transformer(mode):
    import diffusers

    from benchmarks.diffusers_cases.pieces import sd3_config

    torch.manual_seed(0)
    config = sd3_config(in_channels=4, out_channels=4)
    plain = diffusers.SD3Transformer2DModel(**config).eval()
    with mesh(1), torch.no_grad():
        f = dtorch.capture(copy.deepcopy(plain).to("dtorch"))
        for i in range(5):
            inputs = {
                "hidden_states": torch.randn(2, 4, config["sample_size"], config["sample_size"]),
                "encoder_hidden_states": torch.randn(2, 6, config["joint_attention_dim"]),
                "pooled_projections": torch.randn(2, config["pooled_projection_dim"]),
                "timestep": torch.tensor([1.0 + i, 2.0]),
            }
            (got,) = f(**{k: v.to("dtorch") for k, v in inputs.items()}, return_dict=False)
            (want,) = plain(**inputs, return_dict=False)
            assert torch.equal(full(got), want), i
    assert f.replays == 3


def test_a_record_is_straight_line_code(mode):
    """Temporaries go when they are used last, views and constants are taken once, what nobody uses is left out."""
    on = mesh(1)
    x = spread(torch.randn(4, 4), on)

    def f(x):
        x.exp()
        mask = torch.arange(4, device=x.device) > 1
        return (x.t() * mask + x.t()).relu().sum()

    g = dtorch.capture(f)
    for _ in range(3):
        got = g(x)
    assert torch.equal(full(got), f(full(x)))
    if mode == "inline":
        session = x._h.session
        record: Record = list(session.link._executor.records.values())[-1]
        names = [step.program.plan.op.split("::")[1].split(".")[0] for step in record.steps]
        assert names == ["t", "mul", "add", "relu", "sum"]
