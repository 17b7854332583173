"""The patches behind `dtorch exec`: what programs written for CUDA ask of torch, with them and, unchanged, without."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch
import dtorch.api
from dtorch.patches.base import Patch, PatchError, Replacement
from dtorch.patches.cuda_amp import CUDA_AMP
from dtorch.patches.cuda_devices import CUDA_DEVICES
from dtorch.patches.cuda_runtime import CUDA_RUNTIME
from dtorch.patches.cuda_streams import CUDA_STREAMS

PATCHES = (CUDA_DEVICES, CUDA_RUNTIME, CUDA_STREAMS, CUDA_AMP)
CUDA = torch.device("cuda:0")


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(mode="inline")
    yield
    dtorch.shutdown()


@pytest.fixture
def cuda() -> Iterator[None]:
    for patch in PATCHES:
        patch.apply()
    yield
    for patch in PATCHES:
        patch.revert()


def test_without_them_nothing_is_changed() -> None:
    before = [(change.owner, change.name, getattr(change.owner, change.name, None)) for change in changes()]
    for patch in PATCHES:
        patch.apply()
        patch.apply()
    assert torch.cuda.is_available()
    assert all(patch.applied for patch in PATCHES)
    for patch in PATCHES:
        patch.revert()
        patch.revert()
    assert not any(patch.applied for patch in PATCHES)
    assert all(getattr(owner, name, None) is value for owner, name, value in before)
    assert torch.zeros(1, device="dtorch").device == torch.device("dtorch:0")
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def changes() -> list[Replacement]:
    return [change for patch in PATCHES for change in patch.replacements()]


def test_a_library_of_another_version_is_refused() -> None:
    patch = Patch(name="x", library="torch", versions=((1, 0), (1, 5)), reason="none", replacements=lambda: ())
    with pytest.raises(PatchError, match=r"'x' is for torch from 1\.0 to below 1\.5, and 2\.13"):
        patch.apply()


@pytest.mark.usefixtures("cuda")
class TestDevices:
    """Every spelling of the device, everywhere a device may stand."""

    @pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), CUDA])
    def test_spellings(self, device: str | int | torch.device) -> None:
        plain = torch.arange(4.0)
        made = [
            plain.to(device),
            plain.to(device, torch.float16),
            plain.to(device=device, dtype=torch.float64, non_blocking=True),
            plain.cuda(device),
            torch.zeros(2, device=device),
            torch.tensor([1.0], device=device),
            torch.as_tensor([1, 2], device=device),
            torch.randn_like(plain, device=device),
            plain.new_tensor([1, 2], device=device),
            torch.hann_window(4, device=device),
            torch.fft.fftfreq(4, device=device),
            nn.Linear(2, 2, device=device).weight,
            nn.Linear(2, 2).to(device).weight,
            nn.Linear(2, 2).cuda(device).bias,
            nn.Linear(2, 2, device="meta").to_empty(device=device).weight,
            torch.randperm(4, device=device, generator=torch.Generator(device)),
        ]
        assert all(isinstance(t, dtorch.DTensor) and t.is_cuda and t.device == CUDA for t in made)
        assert torch.equal(made[0].cpu(), plain)
        assert not plain.is_cuda

    def test_defaults(self) -> None:
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
            assert torch.ones(2, device="cpu").device.type == "cpu"
        torch.set_default_device("cuda")
        try:
            assert nn.Linear(2, 2).weight.is_cuda
            assert torch.get_default_device().type == "cuda"
        finally:
            torch.set_default_device(None)
        assert torch.accelerator.current_accelerator() == torch.device("cuda")

    def test_generators_make_the_numbers_of_the_cpu(self) -> None:
        generator = torch.Generator(device="cuda").manual_seed(3)
        assert generator.device == CUDA
        there = torch.randn(5, generator=generator, device="cuda")
        assert torch.equal(there.cpu(), torch.randn(5, generator=torch.Generator().manual_seed(3)))

    @pytest.mark.parametrize("device", ["cuda:1", torch.device("cuda:3"), 2])
    def test_there_is_one_device(self, device: str | int | torch.device) -> None:
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(1).to(device)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(device)

    def test_load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "x.pt"
        torch.save({"a": torch.arange(6.0)}, path)
        for location in ("cuda", CUDA, {"cpu": "cuda:0"}):
            assert torch.load(path, map_location=location)["a"].device == CUDA
        with monkeypatch.context() as patch:  # a file of tensors that were on a real CUDA device
            patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
            torch.save({"a": torch.arange(6.0)}, path)
        loaded = torch.load(path)["a"]
        assert loaded.device == CUDA
        assert loaded.tolist() == list(range(6))
        assert torch.load(path, map_location="cpu")["a"].device.type == "cpu"
        torch.save({"a": torch.ones(2, device="cuda")}, path)
        assert torch.load(path, map_location="cuda:0")["a"].is_cuda
        assert not torch.load(path, map_location="cpu")["a"].is_cuda

    def test_scripted_functions_still_compile(self) -> None:
        @torch.jit.script
        def add(x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(3, dtype=x.dtype, device=x.device)

        assert torch.equal(add(torch.ones(3)), torch.ones(3))

    def test_in_other_threads(self) -> None:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(torch.ones(2).cuda().is_cuda))
        thread.start()
        thread.join()
        assert seen == [True]


@pytest.mark.usefixtures("cuda")
class TestRuntime:
    """torch.cuda itself."""

    def test_the_device_is_there(self) -> None:
        assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
        assert torch.cuda.is_initialized()
        assert isinstance(torch.cuda.get_device_name(0), str)
        properties = torch.cuda.get_device_properties("cuda")
        assert properties.total_memory > 0
        assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
        with torch.cuda.device(0):
            torch.cuda.synchronize()

    def test_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated("cuda:0") >= 0
        assert torch.cuda.memory_stats()["num_ooms"] == 0
        assert "allocated" in torch.cuda.memory_summary()

    def test_random_state(self) -> None:
        torch.cuda.manual_seed_all(4)
        first = torch.rand(3, device="cuda")
        torch.manual_seed(4)
        assert torch.equal(torch.rand(3, device="cuda"), first)
        state = torch.cuda.get_rng_state()
        second = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), second)
        with torch.random.fork_rng():
            torch.rand(3, device="cuda")
        torch.cuda.set_rng_state_all([state])
        assert torch.equal(torch.rand(3, device="cuda"), second)

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_dropout_under_checkpoint_is_the_same_twice(self, use_reentrant: bool) -> None:
        x = torch.ones(50, device="cuda", requires_grad=True)
        y = checkpoint(lambda t: nn.functional.dropout(t * t, 0.5), x, use_reentrant=use_reentrant)
        torch.rand(3, device="cuda")
        y.sum().backward()
        assert torch.equal(x.grad, 2 * y.detach())

    def test_streams_and_events(self) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        start.record()
        with torch.cuda.stream(side):
            x = torch.ones(100, device="cuda").cumsum(0)
        end.record(side)
        x.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_event(side.record_event())
        end.synchronize()
        assert end.query()
        assert 0 < start.elapsed_time(end) < 60_000
        with pytest.raises(RuntimeError, match="enable_timing"):
            torch.cuda.Event().elapsed_time(end)

    def test_compiled_and_data_parallel_models_run(self) -> None:
        model = nn.DataParallel(torch.compile(nn.Linear(3, 2), mode="reduce-overhead")).cuda()

        @torch.compile(fullgraph=True)
        def double(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        assert double(model(torch.ones(4, 3, device="cuda"))).shape == (4, 2)

    def test_nvtx(self) -> None:
        torch.cuda.nvtx.range_push("a")
        with torch.cuda.nvtx.range("b"):
            torch.cuda.nvtx.mark("c")
        torch.cuda.nvtx.range_pop()


@pytest.mark.usefixtures("cuda")
class TestAmp:
    """Mixed precision as on the CPU, whose lists of operators the mesh has."""

    @pytest.mark.parametrize("region", [lambda: torch.autocast("cuda"), lambda: torch.amp.autocast(device_type="cuda")])
    def test_autocast(self, region: object) -> None:
        x = torch.ones(2, 2, device="cuda")
        with region():
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
            assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.float16
            with torch.autocast("cuda", dtype=torch.bfloat16):
                assert (x @ x).dtype == torch.get_autocast_gpu_dtype() == torch.bfloat16
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
        assert not torch.is_autocast_enabled("cuda")

    @pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning")
    def test_the_older_names(self) -> None:
        x = torch.ones(2, 2, device="cuda")
        with torch.cuda.amp.autocast():
            assert (x @ x).dtype == torch.float16
        assert torch.cuda.amp.GradScaler().is_enabled()

    @pytest.mark.parametrize("fused", [False, True])
    def test_grad_scaler_skips_what_overflows(self, fused: bool) -> None:
        model = nn.Linear(2, 1).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
        before = model.weight.detach().cpu()
        for value, scale in ((float("inf"), 32.0), (1.0, 32.0)):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((1, 2), value, device="cuda")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            assert torch.equal(model.weight.detach().cpu(), before) == (value == float("inf"))

    def test_custom_functions(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            @torch.amp.custom_bwd(device_type="cuda")
            def backward(ctx, grad):
                return 2 * grad

        x = torch.ones(2, device="cuda", dtype=torch.float16, requires_grad=True)
        with torch.autocast("cuda"):
            y = Double.apply(x)
        assert y.dtype == torch.float32
        y.sum().backward()
        assert x.grad.tolist() == [2, 2]
