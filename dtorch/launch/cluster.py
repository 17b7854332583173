"""A session on a pool of other machines: as a local one, with a bridge to the pool in place of the controller."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from typing import Any

from dtorch.core.config import SessionConfig
from dtorch.core.errors import CommError, ControllerLostError
from dtorch.launch.local import LaunchConfig, LocalLink

_OPEN_S = 30.0


class PoolLink(LocalLink):
    """A ``dtorch.comm.link.Link`` to a session's controller in a pool; the constructor waits until the pool has answered.

    Attributes:
        workers: how many workers the session may have.

    Raises:
        CommError: the pool is not there, or does not let this client in.
    """

    def __init__(self, config: SessionConfig) -> None:
        self._session_config = config
        super().__init__(LaunchConfig(physical=config.device_type))
        try:
            facts = self._next_report(_OPEN_S)
            if "workers" not in facts:
                raise CommError(facts.get("error", f"The pool at {config.address} did not answer."))
        except BaseException:
            self.close()
            raise
        self.workers = int(facts["workers"])

    def _launch(self, config: LaunchConfig, client_fd: int, census_fd: int) -> subprocess.Popen[bytes]:
        given = self._session_config
        self._reports, report_fd = os.pipe()
        self._resources.callback(os.close, self._reports)
        self._unread = b""
        settings = {
            "client_fd": client_fd,
            "census_fd": census_fd,
            "report_fd": report_fd,
            "connect": {
                "address": given.address,
                "token": given.token,
                "keys": given.keys,
                "device_type": given.device_type,
                "restarts": given.restarts,
                "log_operators": given.log_operators,
                "log_bytes": given.log_bytes,
            },
        }
        try:
            process = self._run(
                "dtorch.cluster.bridge", (), (client_fd, census_fd, report_fd), os.environ, subprocess.PIPE
            )
        finally:
            os.close(report_fd)
        assert process.stdin is not None, "a pipe was asked for"
        with process.stdin as out:  # not an argument, which everybody on this machine can read
            out.write(json.dumps(settings).encode())
        return process

    def _next_report(self, timeout_s: float) -> Mapping[str, Any]:
        """The next line of what the bridge says of itself; empty when there is none in time."""
        while b"\n" not in self._unread:
            if not select.select([self._reports], [], [], timeout_s)[0]:
                return {}
            data = os.read(self._reports, 1 << 16)
            if not data:
                return {}
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        facts: Mapping[str, Any] = json.loads(line)
        return facts

    def _dead(self, before: str = "") -> ControllerLostError:
        error = super()._dead(before)
        said = self._next_report(0.0).get("error")
        if said is None:
            return error
        self._death = f"{said} The session's workers, and the tensors in them, are gone; start a new session."
        return ControllerLostError(self._death)

    def _abandon(self) -> None:
        super()._abandon()
        os.close(self._reports)
