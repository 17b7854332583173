"""Scripts written for CUDA, run by `dtorch exec` as they are, print what they print on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1", "DTORCH_THREADS": "1"}
ARGUMENTS = {
    "run_clm.py": ["--bf16", "--output_dir", "out"],
    "generate_text.py": [],
    "text_to_image.py": ["--out", "picture.png"],
    "train_mnist.py": ["--save-model", "mnist.pt"],
    "finetune_lora.py": ["--output_dir", "out"],
}


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[subprocess.Popen[str]]:
    """The reference, at work beside the tests."""
    command = [sys.executable, str(HERE / "cpu_reference.py"), json.dumps(list(ARGUMENTS.items()))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def expected(on_cpu: subprocess.Popen[str]) -> dict[str, str]:
    """Script name to what it prints on the CPU. Wait for it after the other side has run."""
    out, err = on_cpu.communicate(timeout=200)
    assert on_cpu.returncode == 0, err
    return dict(json.loads(out))


def run(tmp_path: Path, script: str, *options: str) -> str:
    command = [sys.executable, "-m", "dtorch.cli", "exec", *options, str(HERE / "scripts" / script), *ARGUMENTS[script]]
    done = subprocess.run(
        command, cwd=tmp_path, env=ONE_THREAD, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("train_mnist.py", ()),
        ("run_clm.py", ("--mesh", "dp=2")),
        ("finetune_lora.py", ()),
        ("generate_text.py", ("--mode", "inline")),
        ("text_to_image.py", ("--mode", "local")),
    ],
)
def test_prints_what_it_prints_on_the_cpu(
    tmp_path: Path, request: pytest.FixtureRequest, script: str, options: tuple[str, ...]
) -> None:
    printed = run(tmp_path, script, *options)
    assert printed.count("\n") > 2
    assert printed == request.getfixturevalue("expected")[script]
