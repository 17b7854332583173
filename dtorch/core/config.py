"""Configuration of a session; the only file that reads the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from dtorch.core.errors import DtorchError, refuse

MODES = ("inline", "local", "cluster")


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """How operators are carried out.

    Attributes:
        mode: ``"inline"``: in this process, one operator at a time; ``"local"``: by child processes; ``"cluster"``: by a
            pool of workers on other machines.
        workers: most worker processes; ``None``: one per processor core. Further devices share them.
        device_type: type of the physical devices, ``"cpu"`` or ``"cuda"``.
        max_devices: number of devices, ``None``: as many as are named.
        threads: computing threads of each worker, ``None``: cores divided by workers, at most torch's in this process.
        strict: hidden redistributions are errors.
        null_workers: for measuring: this many workers that do nothing, one for each device.
        file_roots: workers read and write files below these directories only, links resolved; ``None``: every file that
            this user may.
        restarts: how often in a row lost workers are started again, and brought to where they were, before something new
            is done; 0: the loss of a worker ends the session.
        log_operators: operators that are repeated after a loss at most, roughly; beyond that workers write snapshots.
        log_bytes: the same for the memory that operators and uploads take in the controller; large uploads are copied to
            files of the temporary directory instead.
        memory_limit: bytes that tensors may occupy on each device; an operator that needs more fails. Counted is what
            tensors hold, not what operators need while they run. ``None``: as much as there is.
        address: of the pool's controller, ``tcp://host:port``.
        token: what the pool's controller gave this user, see ``dtorch token``.
        keys: directory with this user's key and the controller's public one, see ``dtorch keys``.
    """

    mode: str = "local"
    workers: int | None = None
    device_type: str = "cpu"
    max_devices: int | None = None
    threads: int | None = None
    strict: bool = False
    null_workers: int = 0
    file_roots: Sequence[str] | None = None
    restarts: int = 3
    log_operators: int = 30_000
    log_bytes: int = 1 << 30
    memory_limit: int | None = None
    address: str | None = None
    token: str | None = field(default=None, repr=False)
    keys: str | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.mode not in MODES:
            faults.append(f"mode={self.mode!r}: the execution mode must be one of {', '.join(MODES)}.")
        for name in ("workers", "max_devices", "threads", "memory_limit"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                faults.append(f"{name}={value!r} must be a positive number or None.")
        for name in ("restarts", "log_operators", "log_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                faults.append(f"{name}={value!r} must be a whole number, at least 0.")
        if self.null_workers and self.workers is not None:
            faults.append(f"workers={self.workers} and null_workers={self.null_workers}: give one of the two.")
        if self.mode == "cluster" and not (self.address and self.token and self.keys):
            faults.append(
                "mode='cluster' needs the address of a pool's controller, a token and a directory of keys: "
                "dtorch.connect(address, token=, keys=), or DTORCH_ADDRESS, DTORCH_TOKEN and DTORCH_KEYS."
            )
        refuse(faults, DtorchError)
        if isinstance(self.file_roots, str):
            raise DtorchError(f"file_roots={self.file_roots!r} must be a list of directories.")
        if self.file_roots is not None:
            object.__setattr__(self, "file_roots", tuple(map(_root, self.file_roots)))

    @property
    def shares_memory(self) -> bool:
        """Whether workers are other processes that can map this one's memory."""
        return self.mode == "local" and sys.platform == "linux"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def from_environment(**given: object) -> SessionConfig:
    """Configuration from arguments (those not ``None``) over the environment over the defaults.

    Environment: DTORCH_MODE; DTORCH_ADDRESS (which alone means mode cluster), DTORCH_TOKEN, DTORCH_KEYS;
    DTORCH_WORKERS; DTORCH_THREADS; DTORCH_FILE_ROOTS (directories, separated as in PATH);
    DTORCH_DTENSOR_IN_SAME_DEVICE=1 puts all devices into one worker, and
    DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE (8) is then the number of devices.

    Raises:
        DtorchError: an unknown mode or a number that is none.
    """
    values: dict[str, object] = {}
    if mode := os.environ.get("DTORCH_MODE"):
        values["mode"] = mode
    elif os.environ.get("DTORCH_ADDRESS"):
        values["mode"] = "cluster"
    for key in ("address", "token", "keys"):
        if text := os.environ.get(f"DTORCH_{key.upper()}"):
            values[key] = text
    for key, name in (("workers", "DTORCH_WORKERS"), ("threads", "DTORCH_THREADS")):
        if text := os.environ.get(name):
            values[key] = _number(name, text)
    if os.environ.get("DTORCH_DTENSOR_IN_SAME_DEVICE") == "1":
        name = "DTORCH_NUM_GPU_WHEN_ENABLE_DTENSOR_IN_SAME_DEVICE"
        values["workers"] = 1
        values["max_devices"] = _number(name, os.environ.get(name, "8"))
    if (roots := file_roots()) is not None:
        values["file_roots"] = roots
    values.update({k: v for k, v in given.items() if v is not None})
    return SessionConfig(**values)  # type: ignore[arg-type]


def file_roots() -> tuple[str, ...] | None:
    """The directories of DTORCH_FILE_ROOTS; ``None`` when it is not set."""
    text = os.environ.get("DTORCH_FILE_ROOTS")
    return None if text is None else tuple(_root(path) for path in text.split(os.pathsep) if path)


def check_roots(path: str, roots: Sequence[str] | None) -> None:
    """Refuse a resolved path that lies below none of the roots.

    Raises:
        PermissionError: it is refused.
    """
    if roots is not None and not any(os.path.commonpath((root, path)) == root for root in roots):
        raise PermissionError(
            f"{path} lies outside of the directories that workers may read ({', '.join(roots) or 'none'}). "
            "Name its directory with file_roots= or DTORCH_FILE_ROOTS."
        )


def _root(path: str) -> str:
    if not os.path.isdir(path):
        raise DtorchError(f"file_roots: {path!r} is not a directory.")
    if os.pathsep in path:  # they reach the workers in their environment
        raise DtorchError(f"file_roots: {path!r} has a {os.pathsep!r} in its name, which separates directories.")
    return os.path.realpath(path)


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as e:
        raise DtorchError(f"{name}={text!r} must be a whole number.") from e
