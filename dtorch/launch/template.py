"""``python -m dtorch.launch.template SETTINGS``: imports what workers need once, then forks one worker a request.

It has one thread, so that its forks are whole, and no process group of its own. Its parent is the controller,
with which it speaks over a SEQPACKET socket: one message a packet, a ``Fork`` with the worker's channel attached.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import NoReturn, cast

from dtorch.comm.channel import Channel
from dtorch.comm.lifetime import describe_exit, end_with_parent
from dtorch.core.errors import ProtocolError
from dtorch.protocol.codec import clip, decode, encode
from dtorch.protocol.messages import (
    Exited,
    Fork,
    Forked,
    Kill,
    Message,
    Stop,
    Stopped,
    TemplateFailed,
    TemplateReady,
)
from dtorch.worker.server import ExecutorFactory, serve

_MAX_REQUEST_BYTES = 1 << 18
_MAX_FAILURE_TEXT = 1 << 14


@dataclass(frozen=True)
class TemplateSettings:
    """What the template is started with.

    Attributes:
        control_fd: the connection to the controller.
        lifeline_fd: the read end of a pipe whose other end only the controller holds.
        census_fd: held by every process of the session, see ``dtorch.launch.local``.
        executor: ``module:name`` of the executor factory.
        physical, peers_dir: passed on to it.
    """

    control_fd: int
    lifeline_fd: int
    census_fd: int
    executor: str
    physical: str
    peers_dir: str


@dataclass
class _Child:
    index: int
    lifeline: int  # the write end of the pipe with whose closing the worker ends


class Template:
    """Forks workers on request and reports their ends."""

    def __init__(self, control: socket.socket, factory: ExecutorFactory, settings: TemplateSettings) -> None:
        self._control, self._factory, self._settings = control, factory, settings
        self._children: dict[int, _Child] = {}  # by pid
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)  # what matters is the byte in the pipe
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(self._wake_read, select.POLLIN)

    def run(self) -> None:
        """Serve the controller until it says stop or is gone; no worker is left then."""
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor == self._wake_read:
                    self._reap()
                    continue
                data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_REQUEST_BYTES, 1)
                request = decode(data) if data else Stop(grace_ms=0)
                if isinstance(request, Fork):
                    self._fork(request, socket.socket(fileno=descriptors[0]))
                elif isinstance(request, Kill):
                    self._signal(signal.SIGKILL, request.index)
                elif isinstance(request, Stop):
                    self._stop(request.grace_ms / 1000)
                    return
                else:
                    raise ProtocolError(f"the controller does not send {type(request).__name__}")

    def _fork(self, request: Fork, connection: socket.socket) -> None:
        read_end, write_end = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(write_end)
            self._report(Exited(request.index, f"no process could be forked: {error}"))
        else:
            if pid == 0:
                self._be_worker(request, connection, read_end, write_end)
            self._children[pid] = _Child(request.index, write_end)
            self._report(Forked(request.index, pid))
        os.close(read_end)
        connection.close()

    def _be_worker(self, request: Fork, connection: socket.socket, lifeline: int, own_write_end: int) -> NoReturn:
        """What the child does; never returns into the template's code."""
        code = 1
        try:
            end_with_parent(lifeline)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            # Asked to end, it leaves what it is in through the `finally` clauses there.
            signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
            sys.unraisablehook = _exit_if_asked
            # The template's descriptors: while a worker held the write ends, the other workers would not end.
            self._control.close()
            for descriptor in (own_write_end, self._wake_read, self._wake_write):
                os.close(descriptor)
            for child in self._children.values():
                os.close(child.lifeline)
            os.environ.update(request.env)
            peers_dir = f"{self._settings.peers_dir}/{request.generation}"
            os.makedirs(peers_dir, exist_ok=True)
            code = serve(
                Channel(connection),
                index=request.index,
                devices=request.devices,
                threads=request.threads,
                factory=self._factory,
                peers_dir=peers_dir,
                physical=self._settings.physical,
            )
        except SystemExit:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Report the workers that have ended, or were stopped by a signal, or go on after that."""
        while _drain(self._wake_read):
            pass
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if not found:
                continue
            child = self._children[pid]
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self._report(Stopped(child.index, int(os.WIFSTOPPED(status))))
                continue
            del self._children[pid]
            os.close(child.lifeline)
            self._report(Exited(child.index, describe_exit(os.waitstatus_to_exitcode(status))))

    def _signal(self, signum: int, index: int | None = None) -> None:
        """Send a signal to one worker, or to all."""
        for pid, child in self._children.items():
            if index is None or child.index == index:
                os.kill(pid, signum)  # not reaped, so the pid is its own

    def _stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self._poller.unregister(self._control)
        self._signal(signal.SIGTERM)
        while self._children and (remaining := deadline - time.monotonic()) > 0:
            self._poller.poll(remaining * 1000)
            self._reap()
        self._signal(signal.SIGKILL)
        while self._children:
            self._poller.poll()
            self._reap()

    def _report(self, message: Message) -> None:
        try:
            self._control.send(encode(message), socket.MSG_NOSIGNAL)
        except ConnectionError:
            return  # the controller has ended, and with it this process does


def _exit_if_asked(unraisable: sys.UnraisableHookArgs) -> None:
    """A worker that was asked to end while it ran a finalizer, out of which nothing can be raised, ends there."""
    if unraisable.exc_type is SystemExit:
        os._exit(0)
    sys.__unraisablehook__(unraisable)


def _drain(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 4096))
    except BlockingIOError:
        return False


def load_factory(name: str) -> ExecutorFactory:
    """The object that ``module:name`` names.

    Raises:
        ImportError, AttributeError, ValueError: there is no such thing.
    """
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ValueError(f"an executor is named as module:name, not {name!r}")
    return cast(ExecutorFactory, getattr(importlib.import_module(module), attribute))


def main() -> None:
    """Serve the controller whose connection SETTINGS (``TemplateSettings`` in JSON) names."""
    settings = TemplateSettings(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(settings.lifeline_fd)
    for descriptor in (settings.control_fd, settings.lifeline_fd, settings.census_fd):
        os.set_inheritable(descriptor, False)
    control = socket.socket(fileno=settings.control_fd)
    try:
        factory = load_factory(settings.executor)
    except Exception as error:
        text = f"the template process could not load {settings.executor}: {error!r}\n{traceback.format_exc()}"
        control.send(encode(TemplateFailed(clip(text[:_MAX_FAILURE_TEXT]))))
        sys.exit(1)
    faulthandler.enable()  # a worker that crashes in native code says where
    gc.collect()
    gc.freeze()  # the garbage collector of a worker need not touch, and so copy, the template's memory
    control.send(encode(TemplateReady()))
    Template(control, factory, settings).run()


if __name__ == "__main__":
    main()
