"""Help, the tables, and what the command line promises to scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import dtorch
from dtorch.models import MODELS

HEAVY = ("torch", "diffusers", "transformers", "numpy", "zmq")


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["models"], ["--version"]])
def test_light_commands_load_nothing_heavy(args: list[str]) -> None:
    program = (
        "import sys\n"
        "from dtorch.cli.main import app\n"
        f"app({args!r}, standalone_mode=False)\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("LOADED []\n"), done.stdout


def test_options_of_run_are_these(cli) -> None:
    text = cli("run", "--help").stdout
    options = (
        "prompt out model mesh mode negative-prompt steps guidance height width seed num-images dtype check json debug"
    )
    for option in options.split():
        assert f"--{option} " in text


def test_no_arguments_show_help(cli) -> None:
    result = cli()
    assert result.exit_code == 0
    assert result.stdout == cli("--help").stdout


def test_models_lists_the_registry(cli) -> None:
    result = cli("models")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in MODELS)


def test_version(cli) -> None:
    assert cli("--version").stdout == f"dtorch {dtorch.__version__}\n"


def test_info_as_json(cli) -> None:
    result = cli("info", "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert facts["torch"] == version("torch")
    assert {"dtorch", "python", "diffusers", "transformers", "pyzmq", "mode", "native part"} <= facts.keys()
    assert facts["devices"][0].startswith("cpu")
    patches = {patch["name"]: patch for patch in facts["patches"]}
    assert {"transformers-devices", "safetensors-loading", "cuda-amp"} <= patches.keys()
    assert patches["safetensors-loading"]["versions"] == "from 0.8 to below 1"
    assert "safe_open" in patches["safetensors-loading"]["reason"]


def test_info_for_people(cli) -> None:
    result = cli("info")
    assert result.exit_code == 0, result.stderr
    assert version("diffusers") in result.stdout
    assert "\n  accelerate-devices  (accelerate from 1.10 to below 2): Accelerator() and " in result.stdout
