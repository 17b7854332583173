"""The exception tree.

DtorchError(RuntimeError)
├── PlacementError      a placement, mesh or redistribution that cannot work
│   └── ImplicitRedistributionError   strict mode refused hidden communication
├── RemoteError         an operator failed on a worker; carries operator, device, user line, remote traceback
├── WorkerLostError     a worker ended while the session needed it
├── SessionClosedError  the session has been shut down, or belongs to another process (fork)
├── LoadError           a file of weights that is missing, damaged or does not fit; an OSError as well
├── SaveError           a checkpoint that could not be written; an OSError as well
├── CommError           a connection failed
│   └── ControllerLostError   the session's controller ended, and its workers with it
└── ProtocolError       a malformed message
"""

from __future__ import annotations

from collections.abc import Sequence


class DtorchError(RuntimeError):
    """Base of every error that dtorch raises on its own account."""


class PlacementError(DtorchError, ValueError):
    """A placement, a mesh or a redistribution that cannot work; the text says why and what to use instead."""


def refuse(faults: Sequence[str], kind: type[DtorchError] = PlacementError) -> None:
    """Report all faults of a call's arguments at once.

    Raises:
        PlacementError, or ``kind``: there are any.
    """
    if faults:
        raise kind(faults[0] if len(faults) == 1 else f"{len(faults)} faults. " + " ".join(faults))


class ImplicitRedistributionError(PlacementError):
    """Strict mode: an operator would have moved data between devices without being asked."""


class RemoteError(DtorchError):
    """An operator failed on a worker.

    Attributes:
        operator: name of the operator, for example ``aten.mm.default``.
        device: the mesh device that reported the failure, for example ``cpu:1``.
        site: ``file:line`` of the user's code that issued the operator, or ``None``.
        remote_type: name of the exception's class on the worker.
        remote_traceback: the traceback on the worker, as text.
    """

    def __init__(
        self,
        message: str,
        operator: str = "",
        device: str = "",
        site: str | None = None,
        remote_type: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.operator, self.device, self.site = operator, device, site
        self.remote_type, self.remote_traceback = remote_type, remote_traceback

    def again(self, before: str = "") -> RemoteError:
        """The same error, fresh: one that has been raised keeps the tensors of the frames that it went through."""
        return type(self)(
            f"{before}{self}", self.operator, self.device, self.site, self.remote_type, self.remote_traceback
        )


class WorkerLostError(DtorchError):
    """A worker ended (killed, crashed or unreachable) while the session still needed what it held."""


class SessionClosedError(DtorchError):
    """The session was shut down, or this process is a fork of the one that started it."""


class LoadError(DtorchError, OSError):
    """A file of weights that is missing, damaged, does not fit or must not be read; the text names file and key."""


class SaveError(DtorchError, OSError):
    """A checkpoint that could not be written; what was at its place before is still there."""


class CommError(DtorchError):
    """A connection between client, controller and workers failed."""


class ControllerLostError(CommError):
    """The controller ended or was stopped; its workers, and the tensors in them, are gone with it."""


class ProtocolError(DtorchError):
    """A message that does not follow the protocol; the text names the field."""
