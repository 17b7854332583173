"""The pages say what is true: every Python block in them runs, and the commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = {
    page: re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL) for page in DOCS.glob("*.md")
}
# Blocks of a page share a process, as starting one takes longest, and nothing else.
RUN = """
import sys, dtorch
for path in sys.argv[1:]:
    exec(compile(open(path, encoding="utf-8").read(), path, "exec"), {"__name__": "__main__"})
    dtorch.shutdown()
"""


@pytest.mark.parametrize("page", sorted(page for page in BLOCKS if BLOCKS[page]), ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    scripts = [tmp_path / f"block_{number}.py" for number in range(len(BLOCKS[page]))]
    for script, code in zip(scripts, BLOCKS[page], strict=True):
        script.write_text(code, encoding="utf-8")
    env = {**os.environ, "DTORCH_MODE": "inline", "XDG_CACHE_HOME": str(tmp_path)}  # many devices in one process
    command = [sys.executable, "-c", RUN, *map(str, scripts)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_pages_are_there() -> None:
    with_blocks = {page.stem for page in BLOCKS if BLOCKS[page]}
    assert {"tensors", "module_parallel", "llama", "diffusion"} <= with_blocks


def test_commands_exist() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dtorch.cli", "--help"], check=True, capture_output=True, text=True, timeout=60
    )
    for page in DOCS.glob("*.md"):
        for command in re.findall(r"(?:^    |`)dtorch ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert command in done.stdout, f"{page.name}: dtorch {command}"
