"""Ties the life of a process to that of its parent, and words how a process ended."""

from __future__ import annotations

import fcntl
import os
import select
import signal


def end_with_parent(pipe_fd: int) -> None:
    """Let the kernel kill this process when the other end of a pipe is closed, which only its parent holds.

    Needs no thread and no cooperation of the main thread: a process that is stopped, or busy in native code, ends too.

    Args:
        pipe_fd: the read end of the pipe; nothing is ever written to it.
    """
    fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poller = select.poll()
    poller.register(pipe_fd, select.POLLIN)
    if poller.poll(0):  # the parent ended before the signal was armed
        os.kill(os.getpid(), signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Words for an exit code as ``subprocess`` and ``os.waitstatus_to_exitcode`` give it: negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
