"""A program under `dtorch exec` cannot tell that python is not what runs it: arguments, paths, errors, exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What the command does once its options are read, without the seconds that importing torch takes.
RUNNER = (
    "import sys; from dtorch.cli.main_program import run_main_program; "
    "run_main_program(sys.argv[2], sys.argv[3:], as_module=sys.argv[1] == '-m', keep_frames=False)"
)
SHOW = """\
import sys
shown = {name: str(value).split(" object at ")[0] for name, value in globals().items() if name.startswith("__")}
shown.pop("__builtins__")
print(sorted(shown.items()), sys.argv, sys.path, sys.modules["__main__"].shown is shown)
print(sys.excepthook is sys.__excepthook__)
"""
CHAINED = """\
def f():
    try:
        {}["a"]
    except KeyError as error:
        raise ValueError("b") from error
f()
"""
OWN_HOOK = """\
import sys
sys.excepthook = lambda kind, error, trace: print("hook", error, trace.tb_lineno)
raise OSError(1)
"""
ENDINGS = {
    "chained error": CHAINED,
    "error in a library": "import json\njson.loads('{')",
    "error group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "ring of errors": "a = ValueError(1)\na.__context__ = b = ValueError(2)\nb.__cause__ = a\nraise a",
    "syntax error": "def f(:\n    pass",
    "exit code": "import sys\nsys.exit(7)",
    "exit text": "import sys\nsys.exit('no such thing')",
    "own hook": OWN_HOOK,
}


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def same(left: subprocess.CompletedProcess[str], right: subprocess.CompletedProcess[str]) -> None:
    assert (left.returncode, left.stdout, left.stderr) == (right.returncode, right.stdout, right.stderr)


@pytest.mark.parametrize("ending", ENDINGS)
def test_ends_as_under_python(tmp_path: Path, ending: str) -> None:
    (tmp_path / "program.py").write_text(SHOW + ENDINGS[ending])
    direct = run(["program.py", "a", "--b", "-m", "--"], tmp_path)
    assert direct.returncode != 0
    same(run(["-c", RUNNER, "", "program.py", "a", "--b", "-m", "--"], tmp_path), direct)


def test_a_script_elsewhere_and_behind_a_link(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "program.py").write_text(SHOW + "import beside\n1 / 0")
    (folder / "beside.py").touch()
    (tmp_path / "link.py").symlink_to(folder / "program.py")
    for path in ("real/program.py", "real/../link.py"):
        same(run(["-c", RUNNER, "", path], tmp_path), run([path], tmp_path))


def test_a_module(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("print('package')")
    (tmp_path / "pack" / "__main__.py").write_text(SHOW + "from pack import other")
    (tmp_path / "pack" / "other.py").write_text(SHOW + "1 / 0")
    for name in ("pack", "pack.other"):
        same(run(["-c", RUNNER, "-m", name, "--x"], tmp_path), run(["-m", name, "--x"], tmp_path))


def test_an_interrupt(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)")
    done, direct = run(["-c", RUNNER, "", "program.py"], tmp_path), run(["program.py"], tmp_path)
    assert (done.returncode, done.stderr) == (130, direct.stderr)


FAILING = """\
import sys, torch

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("in backward")

def shapes(x):
    return x @ torch.ones(5, 4, device="cuda")

x = torch.ones(3, device="cuda", requires_grad=True)
if sys.argv[1] == "shapes":
    shapes(x)
elif sys.argv[1] == "backward":
    Double.apply(x).sum().backward()
else:
    missing = torch.randint(7, 9, (2,)).cuda()
    torch.arange(3, device="cuda").index_select(0, missing)
    print("end")
    sys.exit()
"""


@pytest.mark.parametrize(
    ("which", "options", "lines"),
    [
        ("shapes", ("--mode", "inline"), [", in <module>\n    shapes(x)", ", in shapes\n", "RuntimeError:"]),
        ("backward", (), [", in <module>\n    Double", ", in backward\n", "ValueError: in backward"]),
        ("late", (), ["program.py:22: IndexError"]),
    ],
)
def test_errors_show_lines_of_the_program_only(
    tmp_path: Path, which: str, options: tuple[str, ...], lines: list[str]
) -> None:
    (tmp_path / "program.py").write_text(FAILING)
    done = run(["-m", "dtorch.cli", "exec", *options, "program.py", which], tmp_path)
    assert done.returncode == 1
    assert done.stdout == ("end\n" if which == "late" else "")
    positions = [done.stderr.find(line) for line in lines]
    assert -1 not in positions, done.stderr
    assert positions == sorted(positions)
    assert "/dtorch/" not in done.stderr
    assert "/patches/" not in done.stderr


def test_debug_shows_all_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FAILING)
    done = run(["-m", "dtorch.cli", "exec", "--mode", "inline", "--debug", "program.py", "shapes"], tmp_path)
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/program.py", line ')
    assert "/dtorch/client/dispatch.py" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.py"], "there is no file missing.py; to run a module, put -m before its name."),
        ([], "Missing argument 'SCRIPT'."),
        (["--mesh", "dp", "x.py"], "'dp' is not an axis"),
        (["--mesh", "dp=0", "x.py"], "axis 'dp' has no devices"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "x.py").touch()
    done = run(["-m", "dtorch.cli", "exec", *arguments], tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
