"""What each patch of a Hugging Face library changes: the same call with it and, as the library has it, without."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import patches
from dtorch.core.errors import LoadError
from dtorch.patches import PatchError

MESH = torch.device("dtorch", 0)
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dtorch.shutdown()
    dtorch.init(mode="inline")
    with dtorch.init_device_mesh("cpu", (1,)):
        yield
    dtorch.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture
def patched() -> Iterator[Callable[..., None]]:
    """Applies patches by name; they are taken back when the test is over."""

    def apply(*names: str) -> None:
        patches.apply(*names)

    yield apply
    patches.revert()
    reset_accelerate()


def reset_accelerate() -> None:
    """accelerate keeps the device of the first Accelerator for the whole program."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def toy() -> Any:
    """A toy Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def device_of(model: torch.nn.Module) -> torch.device:
    """The one device of all parameters."""
    (device,) = {p.device for p in model.parameters()}
    return device


# -- the registry ------------------------------------------------------------------------------------------------------
def test_all_are_applied_and_taken_back() -> None:
    names = {"safetensors-loading", "accelerate-devices", "transformers-loading", "transformers-devices",
             "diffusers-loading", "diffusers-devices"}  # fmt: skip
    assert {patch.name for patch in patches.apply()} == names
    assert {patch.name for patch in patches.available() if patch.applied} == names
    patches.apply()
    patches.revert()
    patches.revert()
    assert not any(patch.applied for patch in patches.available())


def test_taking_back_restores_every_attribute() -> None:
    chosen = [p for p in patches.available() if not p.name.startswith("cuda")]
    changes = [change for patch in chosen for change in patch.replacements()]
    before = [inspect.getattr_static(change.owner, change.name) for change in changes]
    patches.apply()
    during = [inspect.getattr_static(change.owner, change.name) for change in changes]
    patches.revert()
    after = [inspect.getattr_static(change.owner, change.name) for change in changes]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert not any(a is b for a, b in zip(before, during, strict=True))


def test_every_patch_says_what_it_is_for() -> None:
    found = patches.available()
    assert len({patch.name for patch in found}) == len(found) >= 10
    for patch in found:
        assert patch.reason
        assert patch.versions[0] < patch.versions[1]
        assert patch.name.startswith(patch.library) or patch.library == "torch"


def test_the_public_function() -> None:
    dtorch.patch("diffusers-devices", "accelerate-devices")
    assert {p.name for p in patches.available() if p.applied} == {"diffusers-devices", "accelerate-devices"}
    patches.revert("diffusers-devices")
    assert {p.name for p in patches.available() if p.applied} == {"accelerate-devices"}
    patches.revert()


@pytest.mark.parametrize("names", [(), ("diffusers-devices",)], ids=["all", "named"])
def test_another_version(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is named must fit; otherwise what does not fit is left out."""
    monkeypatch.setattr(
        patches.base, "version", lambda library: "0.41.9" if library == "diffusers" else version(library)
    )
    text = r"'diffusers-devices' is for diffusers from 0\.42 to below 0\.43, and 0\.41\.9 is installed: install"
    if names:
        with pytest.raises(PatchError, match=text):
            patches.apply(*names)
        assert not any(p.applied for p in patches.available())
    else:
        with pytest.warns(UserWarning, match=text):
            applied = patches.apply()
        assert {p.library for p in applied} == {"safetensors", "accelerate", "transformers"}
        patches.revert()


def test_an_unknown_name() -> None:
    with pytest.raises(PatchError, match="no patch 'numpy'; there are accelerate-devices"):
        patches.apply("numpy")


# -- safetensors -------------------------------------------------------------------------------------------------------
@pytest.fixture
def stored(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    path = tmp_path / "tensors.safetensors"
    save_file({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("device", ["dtorch", "dtorch:0", MESH], ids=str)
def test_safetensors_load_file(device: Any, stored: Path, patched: Callable[..., None]) -> None:
    import safetensors.torch

    with pytest.raises(Exception, match="is invalid"):
        safetensors.torch.load_file(stored, device=device)
    patched("safetensors-loading")
    tensors = safetensors.torch.load_file(stored, device=device)
    assert {name: t.device for name, t in tensors.items()} == {"a": MESH, "b": MESH}
    assert torch.equal(tensors["a"].to_torch(), torch.arange(12.0).view(3, 4))  # type: ignore[attr-defined]
    assert safetensors.torch.load_file(stored)["a"].device == CPU


def test_safetensors_safe_open(stored: Path, patched: Callable[..., None]) -> None:
    import safetensors

    patched("safetensors-loading")
    with safetensors.safe_open(stored, "pt", device="dtorch") as file:
        assert sorted(file.keys()) == ["a", "b"]
        assert file.metadata() is None
        part = file.get_slice("a")
        assert part.get_shape() == [3, 4]
        assert part[1:].device == file.get_tensor("b").device == MESH
        assert part[1:, :2].to_torch().tolist() == [[4, 5], [8, 9]]


def test_safetensors_load_model(tmp_path: Path, patched: Callable[..., None]) -> None:
    from safetensors.torch import load_model, save_model

    source, target = toy(), toy().to("dtorch")
    torch.nn.init.zeros_(target.lm_head.weight)
    save_model(source, str(tmp_path / "model.safetensors"))
    with pytest.raises(Exception, match="is invalid"):
        load_model(target, tmp_path / "model.safetensors", device="dtorch")
    patched("safetensors-loading")
    load_model(target, tmp_path / "model.safetensors", device="dtorch")
    assert torch.equal(target.lm_head.weight.detach().to_torch(), source.lm_head.weight)


# -- device maps -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_automatic_device_maps(device_map: str, tmp_path: Path, patched: Callable[..., None]) -> None:
    model = toy()
    model.save_pretrained(tmp_path)
    assert device_of(type(model).from_pretrained(tmp_path, device_map=device_map)) == CPU
    patched()
    there = type(model).from_pretrained(tmp_path, device_map=device_map)
    assert device_of(there) == MESH
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(there(ids.to("dtorch")).logits.to_torch(), model(ids).logits)


def test_automatic_device_map_of_another_default_mesh(tmp_path: Path, patched: Callable[..., None]) -> None:
    model = toy()
    model.save_pretrained(tmp_path)
    patched()
    with dtorch.init_device_mesh("cpu", (2,)) as mesh:
        index = torch.zeros(1, device="dtorch").device.index
        assert index != 0
        there = type(model).from_pretrained(tmp_path, device_map="auto")
    assert device_of(there) == torch.device("dtorch", index)
    assert there.lm_head.weight.device_mesh == mesh


def test_limits_of_memory_that_are_given_hold(patched: Callable[..., None]) -> None:
    from accelerate.utils import modeling

    patched("accelerate-devices")
    assert modeling.get_max_memory({"cpu": "1MB", 1: "2MB", 0: 5}) == {0: 5, 1: 2_000_000, "cpu": 1_000_000}
    assert list(modeling.get_max_memory()) == [0]


def toy_unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def test_balanced_pipelines(tmp_path: Path, patched: Callable[..., None]) -> None:
    from diffusers import DDPMPipeline, DDPMScheduler

    DDPMPipeline(toy_unet(), DDPMScheduler(10)).save_pretrained(tmp_path)
    assert device_of(DDPMPipeline.from_pretrained(tmp_path, device_map="balanced").unet) == CPU
    patched()
    assert device_of(DDPMPipeline.from_pretrained(tmp_path, device_map="balanced").unet) == MESH


# -- loading -----------------------------------------------------------------------------------------------------------
def test_transformers_loads_to_the_default_mesh(tmp_path: Path, patched: Callable[..., None]) -> None:
    toy().save_pretrained(tmp_path)
    with dtorch.DeviceMesh("cpu", [0, 1, 2]) as mesh:
        here = torch.zeros(1, device="dtorch").device
        model = type(toy()).from_pretrained(tmp_path, device_map="dtorch")
        assert device_of(model) == MESH != here, "its threads know the first mesh only"
        patched("transformers-loading")
        model = type(toy()).from_pretrained(tmp_path, device_map="dtorch")
    assert device_of(model) == here
    assert model.lm_head.weight.device_mesh == mesh


def test_transformers_names_the_damaged_file(tmp_path: Path, patched: Callable[..., None]) -> None:
    toy().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 500)
    with pytest.raises(Exception, match="incomplete") as caught:
        type(toy()).from_pretrained(tmp_path, device_map="dtorch")
    assert file.name not in str(caught.value)
    patched("transformers-loading")
    with pytest.raises(LoadError, match=r"model\.safetensors was cut off: '[\w.]+' ends at byte \d+"):
        type(toy()).from_pretrained(tmp_path, device_map="dtorch")


def test_diffusers_converts_on_the_mesh(tmp_path: Path, patched: Callable[..., None]) -> None:
    model = toy_unet()
    model.save_pretrained(tmp_path)

    def loaded() -> tuple[int, Any]:
        """How many weights were converted there, and the model."""
        report = dtorch.explain(
            lambda: type(model).from_pretrained(tmp_path, device_map={"": "dtorch:0"}, torch_dtype=torch.bfloat16),
            quiet=True,
        )
        return sum("_to_copy" in str(line) for line in report.lines), report.result

    assert loaded()[0] == 0
    patched("diffusers-loading")
    converted, there = loaded()
    assert converted >= len(list(model.parameters()))
    for got, want in zip(there.parameters(), model.bfloat16().parameters(), strict=True):
        assert torch.equal(got.detach().to_torch(), want)


# -- accelerate --------------------------------------------------------------------------------------------------------
def train(accelerator: Any) -> list[torch.Tensor]:
    """Parameters after two steps of the training loop that accelerate's documentation shows."""
    model = toy()
    data = torch.utils.data.DataLoader(torch.arange(3, 51).view(4, 12), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data)
    for ids in data:
        accelerator.backward(model(ids, labels=ids).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerator(mixed_precision: str, patched: Callable[..., None]) -> None:
    from accelerate import Accelerator

    reset_accelerate()
    accelerator = Accelerator(mixed_precision=mixed_precision)
    assert accelerator.device == CPU
    want = train(accelerator)
    reset_accelerate()
    patched("accelerate-devices")
    accelerator = Accelerator(mixed_precision=mixed_precision)
    assert accelerator.device == MESH
    got = train(accelerator)
    assert {t.device for t in got} == {MESH}
    assert all(torch.equal(a.to_torch(), b) for a, b in zip(got, want, strict=True))  # type: ignore[attr-defined]
    reset_accelerate()
    assert Accelerator(cpu=True).device == CPU


# -- transformers ------------------------------------------------------------------------------------------------------
def text_generation(model: Any, **options: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w3", pad_token="w0", eos_token="w2")
    return pipeline("text-generation", model=model, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("options", [{}, {"device": 0}, {"device": "dtorch"}, {"device": MESH}], ids=str)
def test_pipeline(options: dict[str, Any], patched: Callable[..., None]) -> None:
    model, prompts = toy(), ["w5 w7 w9", "w4 w8"]
    want = text_generation(copy.deepcopy(model), device="cpu")(prompts, max_new_tokens=5, do_sample=False)
    if "dtorch" not in str(options):
        assert text_generation(copy.deepcopy(model), **options).device == CPU
    patched("transformers-devices")
    pipe = text_generation(copy.deepcopy(model), **options)
    assert pipe.device.type == "dtorch"
    assert device_of(pipe.model) == MESH
    assert pipe(prompts, max_new_tokens=5, do_sample=False) == want
    assert text_generation(copy.deepcopy(model), device=-1).device == CPU


def test_pipeline_with_device_map(tmp_path: Path, patched: Callable[..., None]) -> None:
    toy().save_pretrained(tmp_path)
    assert text_generation(str(tmp_path), device_map="auto").device == CPU
    patched()
    pipe = text_generation(str(tmp_path), device_map="auto")
    assert pipe.device == device_of(pipe.model) == MESH
    assert pipe("w5 w7", max_new_tokens=2)


def test_pipeline_keeps_a_model_where_it_is(patched: Callable[..., None]) -> None:
    patched("transformers-devices")
    with dtorch.init_device_mesh("cpu", (2,)):
        model = toy().to("dtorch")
    assert text_generation(model).device == device_of(model) != MESH


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer(bf16: bool, tmp_path: Path, patched: Callable[..., None]) -> None:
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 51).view(4, 12)]

    def trained(**options: Any) -> tuple[torch.device, list[torch.Tensor]]:
        reset_accelerate()
        options = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": [],
                   "disable_tqdm": True, "bf16": bf16, **options}  # fmt: skip
        trainer = Trainer(toy(), TrainingArguments(str(tmp_path), **options), train_dataset=data)
        trainer.train()
        return trainer.args.device, [p.detach() for p in trainer.model.parameters()]

    device, want = trained(use_cpu=True)
    assert device == CPU
    if bf16:
        with pytest.raises(ValueError, match="bf16"):
            trained()
    else:
        assert trained()[0] == CPU
    patched()
    device, got = trained()
    assert device == MESH
    assert {t.device for t in got} == {MESH}
    assert all(torch.equal(a.to_torch(), b) for a, b in zip(got, want, strict=True))  # type: ignore[attr-defined]
    assert trained(use_cpu=True)[0] == CPU
