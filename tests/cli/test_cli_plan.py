"""`dtorch plan`, `dtorch suggest` and `dtorch bench-links`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, vocab_size=160,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_plan(cli, command, folder: Path) -> None:
    result = command("plan", "--model", folder, "--mesh", "tp=2,pp=2", "--batch", 2, "--sequence", 8)
    assert result.returncode == 0, result.stderr
    assert "model.layers.3.mlp.down_proj.weight" in result.stdout
    assert "bytes by device: 0: " in result.stdout
    assert "model.layers.1: 2 all_reduce" in result.stdout
    done = cli("plan", "--model", folder, "--mesh", "ring_cp=4", "--batch", 2, "--sequence", 8, "--json")
    values = json.loads(done.stdout)
    assert values["layout"] == {"ring_cp": 4}
    assert len(values["parameter_bytes"]) == 4
    assert values["layers"]["model.layers.0"]["collectives"] == {"move": 6}


def test_plan_refuses(cli, folder: Path, tmp_path: Path) -> None:
    result = cli("plan", "--model", folder, "--mesh", "pp=8")
    assert result.exit_code == 2
    assert "4 layers cannot fill 8 pipeline stages" in " ".join(result.stderr.split())
    result = cli("plan", "--model", tmp_path, "--mesh", "tp=2")
    assert result.exit_code == 2
    assert "config.json" in result.stderr


def test_measure_and_suggest(cli, command, folder: Path) -> None:
    result = command("bench-links", "--devices", 2, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["kinds"].keys() == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "move"}
    done = command("suggest", "--model", folder, "--devices", 2, "--batch", 2, "--sequence", 8, "--top", 2)
    assert done.returncode == 0, done.stderr
    assert "measured on 2 devices" in done.stdout
    assert "1. dp=2" in done.stdout
    done = cli("suggest", "--model", folder, "--devices", 2, "--batch", 1, "--sequence", 8, "--memory", 0.0001, "--json")
    layouts = json.loads(done.stdout)["layouts"]
    assert layouts
    assert not any(s["fits"] for s in layouts)
