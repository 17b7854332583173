"""``python -m dtorch.controller CONFIG``: one session's controller, started by its client."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import socket
import sys
import traceback

from dtorch.comm.channel import Channel
from dtorch.controller.log import Log
from dtorch.controller.server import ControllerConfig, Server, SharedMemory, hold_file, no_shared_memory
from dtorch.controller.state import ControllerState


def main() -> None:
    """Serve the client whose connection CONFIG (``ControllerConfig`` in JSON) names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's, which shuts this process down
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config = ControllerConfig(**json.loads(sys.argv[1]))
    if config.memory:
        resource.setrlimit(resource.RLIMIT_DATA, (config.memory, config.memory))
    for descriptor in (config.client_fd, config.census_fd, config.pool_fd):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    client = Channel(socket.socket(fileno=config.client_fd), config.message_bytes)
    gc.disable()  # the log is millions of small lists without a cycle, which a collection would walk over and over
    log = None
    if config.restarts:
        is_here = config.pool_fd < 0  # the client and its files
        read = SharedMemory(config.snapshots_dir).read if is_here else no_shared_memory
        hold = hold_file if is_here else (lambda path: None)
        log = Log(config.log_operators, config.log_bytes, config.snapshots_dir, read, hold)
    state = ControllerState(os.getpid(), socket.gethostname(), log, config.restarts)
    Server(config, client, state, log).run()
    # The client does this as well, if it has not been killed or interrupted.
    shutil.rmtree(config.session_dir, ignore_errors=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # its frames keep the connection open till the process ends, so the client sees an exit code
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
