"""What the scripts print on the CPU: `python cpu_reference.py RUNS` with a JSON list of [script, arguments] in RUNS.

Each script runs as it is but for "cuda", which becomes "cpu". All run in this one process, because importing the
libraries takes longer than the scripts. Prints a JSON object of script name to output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).with_name("scripts")


def run_on_cpu(script: str, arguments: list[str]) -> str:
    source = (SCRIPTS / script).read_text().replace('"cuda', '"cpu').replace(".cuda()", ".cpu()")
    main = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        os.chdir(folder)
        exec(compile(source, script, "exec"), vars(main))
    return printed.getvalue()


if __name__ == "__main__":
    runs = json.loads(sys.argv[1])
    print(json.dumps({script: run_on_cpu(script, arguments) for script, arguments in runs}))
