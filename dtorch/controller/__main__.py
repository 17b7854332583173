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
from dtorch.controller.server import ControllerConfig, Server, SharedMemory
from dtorch.controller.state import ControllerState


def main() -> None:
    """Serve the client whose connection CONFIG (``ControllerConfig`` in JSON) names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's, which shuts this process down
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    config = ControllerConfig(**json.loads(sys.argv[1]))
    for descriptor in (config.client_fd, config.census_fd):
        os.set_inheritable(descriptor, False)
    client = Channel(socket.socket(fileno=config.client_fd))
    gc.disable()  # the log is millions of small lists without a cycle, which a collection would walk over and over
    log = None
    if config.restarts:
        log = Log(config.log_operators, config.log_bytes, config.snapshots_dir, SharedMemory(config.snapshots_dir).read)
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
