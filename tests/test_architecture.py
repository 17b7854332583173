"""Rules about the code that no tool of its own checks: import layers, file sizes, private torch names, pickle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dtorch"

# Higher layers may import lower ones; modules of one rank only themselves.
RANK = {
    "core": 0, "native": 0, "comm": 1, "protocol": 2, "planner": 3, "client": 4, "controller": 4, "worker": 4,
    "launch": 5, "cluster": 6, "parallel": 6, "nn": 7, "api": 8, "autoload": 8, "cli": 9,
}  # fmt: skip
MAX_LINES = 600
# Reads of the environment outside core/config.py, each with its reason.
ENVIRONMENT = {
    "core/config.py",
    "native/build.py",  # runs before the package is installed
    "controller/spawner.py",  # hands the environment on to the template
    "launch/local.py",  # hands the environment on to its children
    "cluster/agent.py",  # sets what its zygote inherits, before it imports torch
    "launch/cluster.py",  # hands the environment on to the bridge
    "launch/template.py",  # sets a worker's environment
}


def sources() -> Iterator[Path]:
    for folder in (PACKAGE, ROOT / "models", ROOT / "patches"):
        yield from folder.rglob("*.py")


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_downward() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        here = layer(path)
        if here == "__init__":
            continue
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "dtorch" or len(parts) < 2 or parts[1] not in RANK:
                continue
            there = parts[1]
            if there != here and RANK[there] >= RANK[here]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if here in ("controller", "worker") and there == "planner":
                wrong.append(f"{path.relative_to(ROOT)} imports the planner")
    assert not sorted(set(wrong))


def test_files_are_short() -> None:
    long = {str(p.relative_to(ROOT)): n for p in sources() if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_private_torch_names_live_in_one_module() -> None:
    private = re.compile(r"torch\.(_C|_utils|_ops)\b|torch\.(utils|distributed)\.(\w+\.)*_\w+")
    allowed = {"core/torch_private.py"}
    wrong = [
        f"{p.relative_to(PACKAGE)}: {match.group()}"
        for p in PACKAGE.rglob("*.py")
        if str(p.relative_to(PACKAGE)) not in allowed
        for match in private.finditer(p.read_text())
    ]
    assert not wrong


def test_nothing_unpickles() -> None:
    allowed = {"client/checkpoint/dcp.py"}  # another library's index, by an unpickler that knows its classes only
    wrong = [str(p) for p in sources() if not str(p).endswith(tuple(allowed)) and re.search(r"\b(pickle|cloudpickle|dill)\.(loads?|Unpickler)\b", p.read_text())]
    assert not wrong


def test_the_environment_is_read_in_one_place() -> None:
    wrong = [
        str(p.relative_to(PACKAGE))
        for p in PACKAGE.rglob("*.py")
        if str(p.relative_to(PACKAGE)) not in ENVIRONMENT and re.search(r"os\.(environ|getenv)", p.read_text())
    ]
    assert not wrong


def test_import_is_light() -> None:
    code = (
        "import sys, dtorch; heavy = {'torch', 'transformers', 'diffusers'} & set(sys.modules); assert not heavy, heavy; "
        "dtorch.DTensor; heavy = {'transformers', 'diffusers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
