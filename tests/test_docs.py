"""The pages say what is true: every Python block in them runs, each in a program of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = [
    (page, number, code)
    for page in sorted(DOCS.glob("*.md"))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "number", "code"), BLOCKS, ids=[f"{page.stem}-{n}" for page, n, _ in BLOCKS])
def test_blocks_run(page: Path, number: int, code: str, tmp_path: Path) -> None:
    script = tmp_path / "test.py"
    script.write_text(code, encoding="utf-8")
    # Pages have many devices: one process is enough for them.
    env = {**os.environ, "DTORCH_MODE": "inline", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=200, env=env
    )
    assert done.returncode == 0, f"{page.name}, block {number}:\n{done.stderr}"


def test_pages_are_there() -> None:
    for name in ("tensors", "module_parallel", "llama", "diffusion"):
        assert any(page.stem == name for page, _, _ in BLOCKS)


def test_commands_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dtorch.cli", "--help"], check=True, capture_output=True, text=True, timeout=60
    )
    for page in DOCS.glob("*.md"):
        for command in re.findall(r"(?:^    |`)dtorch ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert command in done.stdout, f"{page.name}: dtorch {command}"
