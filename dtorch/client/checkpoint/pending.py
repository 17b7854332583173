"""The save that is going on: one at a time."""

from __future__ import annotations

import logging
import os
import threading
from typing import Protocol

from dtorch.client import graph
from dtorch.core.errors import DtorchError, SaveError

_log = logging.getLogger("dtorch")


class Writing(Protocol):
    """How a checkpoint comes into being."""

    def begin(self, directory: str) -> None:
        """Take the values.

        Raises:
            OSError, DtorchError: that fails; nothing is left.
        """

    def finish(self) -> None:
        """Write them, on another thread, and make the directory the checkpoint; raises as ``begin``."""


class PendingSave:
    """A checkpoint on its way to the disk.

    Attributes:
        directory: where it will be.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._error: BaseException | None = None
        self._is_told = False  # somebody knows of the error
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether it is complete, or has failed; does not wait."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            SaveError: it could not be written; what was there before is still there.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise SaveError(f"{self.directory} was not saved: {self._error}") from self._error

    def _start(self, writing: Writing) -> None:
        """Go on in the background. The thread is no daemon: the program ends after it."""

        def work() -> None:
            try:
                writing.finish()
            except BaseException as e:  # whatever it is, `wait` tells it
                self._error = e

        self._thread = threading.Thread(target=work, name="dtorch-save")
        self._thread.start()


_last: list[PendingSave] = []


def begin(directory: str, writing: Writing) -> PendingSave:
    """Take the values now, and write them in the background. What the disk refuses is told by ``wait``.

    Raises:
        SaveError: the directory cannot become a checkpoint.
    """
    pending = PendingSave(directory)
    try:
        writing.begin(directory)
        pending._start(writing)
    except SaveError:
        raise
    except (OSError, DtorchError) as e:  # the disk's, or of a session that has ended
        pending._error = e
    _last[:] = [pending]
    return pending


def previous() -> None:
    """Wait for the last save.

    Raises:
        SaveError: it could not be written, and nobody has been told.
    """
    if _last and not _last[0]._is_told:
        _last[0].wait()
    _last.clear()


def complete(directory: str | os.PathLike[str]) -> None:
    """Wait while this directory is being written; whether that succeeds does not matter."""
    for pending in _last:
        if pending._thread is not None and os.path.realpath(pending.directory) == os.path.realpath(directory):
            pending._thread.join()


def _end() -> None:
    """Before sessions end: their workers may still be writing."""
    try:
        previous()
    except SaveError as e:
        _log.warning("%s", e)
        _last.clear()


graph.before_end.append(_end)
