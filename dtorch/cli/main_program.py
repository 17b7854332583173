"""Running a file or a module as `__main__`, so that it sees what it would see under `python`."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, TracebackType


def run_main_program(target: str, arguments: list[str], *, as_module: bool, keep_frames: bool) -> None:
    """Run `target` with `sys.argv`, `sys.path[0]` and `__main__` as python sets them, and wait for its work to be done.

    Args:
        target: path of a file, or with `as_module` name of a module.
        arguments: what follows it in `sys.argv`.
        keep_frames: leave the lines of dtorch in a traceback.

    Raises:
        SystemExit: the program's own; with 1 after an exception that it did not catch, which `sys.excepthook` has
            shown; with 130 after an interrupt.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__annotations__={}, __builtins__=builtins)
    sys.argv = [target, *arguments]
    sys.excepthook = sys.__excepthook__  # the command line has one of its own
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.realpath(target))
    try:
        ended = _run(target, as_module)
        if ended is None or not ended.code:
            _wait_for_work()
    except BaseException as error:
        _hide_frames(error, keep_frames, set())
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
    if ended is not None:
        raise ended


def _run(target: str, as_module: bool) -> SystemExit | None:
    """Run the program; returns the exit that it asked for, if it did."""
    try:
        if as_module:
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # what python -m itself calls
        else:
            _run_file(target)
    except SystemExit as error:
        return error
    return None


def _run_file(path: str) -> None:
    main = vars(sys.modules["__main__"])
    full_path = os.path.join(os.getcwd(), path)
    loader = importlib.machinery.SourceFileLoader("__main__", full_path)
    main.update(__file__=full_path, __loader__=loader, __cached__=None)
    exec(compile(loader.get_data(full_path), full_path, "exec", dont_inherit=True), main)  # noqa: S102  (the user's own script, as python runs it)


def _wait_for_work() -> None:
    """What the program left running may still fail, and that would be an error of the program."""
    from dtorch.client.graph import sessions

    for session in sessions():
        session.synchronize()


def _hide_frames(error: BaseException, keep_inner: bool, seen: set[int]) -> None:
    """Take the frames of dtorch out of the traceback of an exception and of those behind it.

    Args:
        keep_inner: keep those below the program's first.
        seen: ids of the exceptions looked at; a chain may be a ring.
    """
    if id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _joined(_programs_frames(error.__traceback__, keep_inner))
    for behind in (error.__cause__, error.__context__):
        if behind is not None:
            _hide_frames(behind, keep_inner, seen)


def _programs_frames(trace: TracebackType | None, keep_inner: bool) -> list[TracebackType]:
    """The frames without dtorch's, and without those of torch that only dtorch has called."""
    kept: list[TracebackType] = []
    below_ours: list[TracebackType] | None = None  # torch's frames since one of ours
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        if keep_inner and kept:
            kept.append(trace)
        elif filename.startswith(_OURS):
            below_ours = []
        elif below_ours is not None and filename.startswith(_TORCH):
            below_ours.append(trace)
        else:
            kept += [*(below_ours or ()), trace]
            below_ours = None
        trace = trace.tb_next
    return kept


def _joined(frames: list[TracebackType]) -> TracebackType | None:
    joined: TracebackType | None = None
    for frame in reversed(frames):
        joined = TracebackType(joined, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return joined


def _folder(package: str) -> str:
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations, f"{package} is a package and installed"
    return str(Path(next(iter(spec.submodule_search_locations)))) + os.sep


# Parts of dtorch lie elsewhere than the rest in an editable installation.
_OURS = (_folder("dtorch"), _folder("dtorch.patches"), _folder("dtorch.models"))
_TORCH = _folder("torch")
