"""The process that has imported what workers need, and forks a template for each session of a pool.

It has one thread and is the agent's child; so are, through it, all workers of the machine: they end with the agent.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from typing import NoReturn

from dtorch.comm.lifetime import end_with_parent
from dtorch.launch.template import Template, TemplateSettings
from dtorch.worker.server import ExecutorFactory

_MAX_REQUEST_BYTES = 1 << 16


class Zygote:
    """The agent's end.

    Args:
        factory: what workers run batches with.
        memory: most bytes of memory of a process.
    """

    def __init__(self, factory: ExecutorFactory, memory: int) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_end, self._lifeline = os.pipe()
        gc.collect()
        gc.freeze()  # as in the template
        self.pid = os.fork()
        if self.pid == 0:
            self._control.close()
            os.close(self._lifeline)
            _serve(theirs, read_end, factory, memory)
        theirs.close()
        os.close(read_end)

    def start(self, control: socket.socket, lifeline: int, physical: str, peers_dir: str) -> None:
        """Start a template that is controlled through this socket and ends with this pipe; keeps neither."""
        settings = TemplateSettings(0, 0, 0, "", physical, peers_dir)
        socket.send_fds(self._control, [json.dumps(asdict(settings)).encode()], [control.fileno(), lifeline])
        control.close()
        os.close(lifeline)

    def fileno(self) -> int:
        """Readable when the zygote has ended."""
        return self._control.fileno()

    def close(self) -> None:
        """End it; templates end with their pipes."""
        os.close(self._lifeline)
        self._control.close()
        os.waitpid(self.pid, 0)


def _serve(control: socket.socket, lifeline: int, factory: ExecutorFactory, memory: int) -> NoReturn:
    code = 1
    try:
        end_with_parent(lifeline)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for templates
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 2)
            if not data:
                break
            if os.fork() == 0:
                control.close()
                os.close(lifeline)
                _be_template(TemplateSettings(**json.loads(data)), descriptors, factory)
            for descriptor in descriptors:
                os.close(descriptor)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _be_template(settings: TemplateSettings, descriptors: list[int], factory: ExecutorFactory) -> NoReturn:
    code = 1
    control, lifeline = descriptors
    try:
        end_with_parent(lifeline)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Template(socket.socket(fileno=control), factory, settings).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
