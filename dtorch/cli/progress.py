"""What the user sees while a command works: one line on stderr, gone when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
    """A progress bar that goes through named stages and times them. It shows nothing where stderr is no terminal.

        with Stages() as stages, stages.stage("draw", total=28):
            stages.advance_to(1)

    Attributes:
        seconds: how long each finished stage took.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=None)
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Stages:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        """The stage `name`, of `total` steps or of unknown length."""
        self._bar.reset(self._task, description=name, total=total)
        self._bar.start()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - start

    def pause(self) -> None:
        """Clear the line for what is printed next; a later stage shows it again."""
        self._bar.stop()

    def advance_to(self, step: int) -> None:
        """Say that `step` steps of the stage are done."""
        self._bar.update(self._task, completed=step)
