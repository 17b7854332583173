"""`dtorch generate` on real meshes, compared with plain transformers by its own --check."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from dtorch.cli import generate as generate_module
from dtorch.cli.main import app
from dtorch.models import DEMO_TEXT_MODEL
from dtorch.models.cache import demo_folder
from dtorch.models.text import TextRequest, continue_text, encode, load_text_model

Generate = Callable[..., Result]
PROMPT = ("--prompt", "The cat sat on")


@pytest.fixture(scope="module")
def llama(cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return demo_folder(DEMO_TEXT_MODEL)


@pytest.fixture
def llama_copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of the demo that the test may change."""
    return Path(shutil.copytree(llama, tmp_path / "llama"))


@pytest.fixture
def generate(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Generate:
    """Runs `dtorch generate ARGS...` in this process with one device in it, and with `text` as what is typed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("DTORCH_MODE", "inline")
    return lambda *args, text="": CliRunner().invoke(app, ["generate", *map(str, args)], input=text, prog_name="dtorch")


def complaint(result: Result, exit_code: int = 2) -> str:
    """The one line on stderr of a command that failed as it should."""
    assert result.exit_code == exit_code, (result.stderr, result.exception)
    assert re.fullmatch(r"Error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_demo_says_words_and_one_device_gives_the_tokens_of_transformers(generate: Generate) -> None:
    result = generate(*PROMPT, "--max-new-tokens", 12, "--check")
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"( [a-z]+){12}\n", result.stdout)
    assert "12 tokens" in result.stderr
    assert "check: plain transformers gives the same tokens" in result.stderr


def test_two_local_devices_draw_the_tokens_of_transformers(command) -> None:
    sampling = ("--temperature", "0.8", "--top-k", "30", "--top-p", "0.95", "--seed", "5")
    done = command("generate", *PROMPT, "--max-new-tokens", 10, *sampling, "--mesh", "tp=2", "--check", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"] is True
    assert len(report["tokens"]) == 10
    assert (report["finish"], report["mesh"], report["mode"]) == ("length", {"tp": 2}, "local")
    assert {"load", "place", "first token", "generate"} <= report["seconds"].keys()
    tokenizer = AutoTokenizer.from_pretrained(report["folder"])
    assert report["text"] == tokenizer.decode(report["tokens"], skip_special_tokens=True)
    assert report["num_prompt_tokens"] == len(tokenizer(report["prompt"])["input_ids"])
    pids = {worker["pid"] for worker in report["workers"]}
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # nothing is left running


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2", "tp=2,dp=2"])
def test_meshes_and_types(generate: Generate, mesh: str) -> None:
    result = generate(*PROMPT, "--max-new-tokens", 3, "--mesh", mesh, "--check")
    assert result.exit_code == 0, result.stderr


def test_a_folder_of_the_user_that_ends_its_text(generate: Generate, llama_copy: Path) -> None:
    options = ("--model", llama_copy, *PROMPT, "--dtype", "bfloat16", "--json")
    first = json.loads(generate(*options, "--max-new-tokens", 3).stdout)
    assert first["finish"] == "length"
    edit(llama_copy / "generation_config.json", eos_token_id=first["tokens"][2])
    result = json.loads(generate(*options, "--check").stdout)
    assert (result["tokens"], result["finish"], result["check"]) == (first["tokens"], "end", True)


def test_a_check_that_fails_fails_the_command(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        generate_module, "check_tokens", lambda job, result, stages: dataclasses.replace(result, check=False)
    )
    result = generate(*PROMPT, "--max-new-tokens", 2, "--check")
    assert result.exit_code == 1
    assert "Error: plain transformers gives other tokens, and one device should give the same" in result.stderr


def test_text_comes_piece_by_piece(llama: Path) -> None:
    model, tokenizer = load_text_model(llama, "float32")
    pieces: list[str] = []
    request = TextRequest(max_new_tokens=8)
    made = continue_text(model, tokenizer, encode(tokenizer, "a cat"), request, pieces.append)
    assert sum(bool(piece) for piece in pieces) > 4
    assert "".join(pieces) == made.text
    assert 0 < made.first_s < made.total_s


def test_drawing_depends_on_the_seed_only(llama: Path) -> None:
    model, tokenizer = load_text_model(llama, "float32")
    ids = encode(tokenizer, "a cat")

    def draw(seed: int, **options: object) -> list[int]:
        return continue_text(model, tokenizer, ids, TextRequest(max_new_tokens=12, seed=seed, **options)).tokens

    assert draw(1, temperature=1.5) == draw(1, temperature=1.5) != draw(2, temperature=1.5)
    assert draw(1, temperature=1.5, top_k=1) == draw(1) == draw(2)


def test_a_conversation(generate: Generate) -> None:
    talk = generate("--chat", "--max-new-tokens", 4, "--prompt", "good morning", text="\nwhat is new?\n  \n")
    assert talk.exit_code == 0, talk.stderr
    assert re.fullmatch(r"(( [a-z]+){4}\n){2}", talk.stdout)
    first, second = talk.stdout.splitlines()
    assert generate("--chat", "--max-new-tokens", 4, text="good morning\n").stdout == f"{first}\n"
    assert generate("--chat", "--max-new-tokens", 4, text="what is new?\n").stdout != f"{second}\n"  # it remembers


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "there is nothing to continue; give a --prompt, or --chat to talk"),
        ([*PROMPT, "--top-k", "3"], "add a --temperature above 0"),
        ([*PROMPT, "--temperature", "-1"], "--temperature"),
        ([*PROMPT, "--top-p", "2"], "--top-p"),
        ([*PROMPT, "--max-new-tokens", "0"], "--max-new-tokens"),
        ([*PROMPT, "--mesh", "tp"], "'tp' is not an axis"),
        ([*PROMPT, "--dtype", "int4"], "bfloat16"),
        ([*PROMPT, "--model", "nowhere"], "there is no folder nowhere; pass --model a folder in transformers format"),
        (["--chat", "--json"], "--chat goes with neither --check nor --json"),
        (["--prompt", ""], "the prompt is empty"),
        ([*PROMPT, "--max-new-tokens", "2041"], "leaves 2040 of those that the model takes; use at most so many"),
        (["--prompt", "cat " * 2048], "the model takes fewer than 2048; shorten it"),
    ],
)
def test_what_cannot_work_is_one_line(generate: Generate, args: list[str], text: str) -> None:
    assert text in complaint(generate(*args))


def test_an_axis_of_no_known_kind(generate: Generate) -> None:
    assert "parallelize knows axes named dp, tp" in complaint(generate(*PROMPT, "--mesh", "x=2"))


def test_a_folder_that_is_not_whole(generate: Generate, llama_copy: Path) -> None:
    weights = llama_copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    options = ("--model", llama_copy, *PROMPT)
    assert f"{weights} is damaged or cut short" in complaint(generate(*options))
    weights.rename(weights.with_suffix(".bin"))
    assert "has no weights in safetensors format" in complaint(generate(*options))
    weights.write_bytes(whole)
    edit(llama_copy / "config.json", hidden_size=64)
    assert f"transformers cannot load {llama_copy}" in complaint(generate(*options))
    for path in llama_copy.glob("tokenizer*"):
        path.unlink()
    assert "has no tokenizer" in complaint(generate(*options))
    (llama_copy / "config.json").write_text("{")
    assert "cannot be read as JSON" in complaint(generate(*options))
    (llama_copy / "config.json").unlink()
    assert "is no transformers folder: it has no config.json" in complaint(generate(*options))


def test_a_model_that_cannot_talk(generate: Generate, llama_copy: Path) -> None:
    (llama_copy / "chat_template.jinja").unlink()
    line = complaint(generate("--model", llama_copy, "--chat", text="hello\n"))
    assert "has no chat template; leave out --chat and give a --prompt" in line


def test_a_folder_of_another_kind_of_model(demo, generate: Generate) -> None:
    encoder = demo("sd3") / "text_encoder"
    assert "has no tokenizer" in complaint(generate("--model", encoder, *PROMPT))


def test_a_damaged_demo(generate: Generate, llama: Path) -> None:
    config = llama / "config.json"
    whole = config.read_bytes()
    config.write_text("[]")
    try:
        line = complaint(generate(*PROMPT), exit_code=1)
    finally:
        config.write_bytes(whole)
    assert f"the cached demo model is damaged: {config}" in line
    assert f"Or remove {llama} to build it anew" in line


def test_the_demo_is_the_same_in_another_process(llama: Path, tmp_path: Path) -> None:
    program = (
        "from dtorch.models import DEMO_TEXT_MODEL; from dtorch.models.cache import demo_folder; "
        "print(demo_folder(DEMO_TEXT_MODEL))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    other = Path(done.stdout.strip())
    assert other.name == llama.name
    for path in llama.iterdir():
        assert (other / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "text", ["A Cat!", "zebra quagga", "naïve café", "猫と犬 🐱", "\x00\t\n", " a cat in the forest"]
)
def test_the_demo_takes_any_text_and_gives_it_back(llama: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert tokenizer.decode(encode(tokenizer, text)[0]) == text
