"""What the programs of a pool are told from outside, checked."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dtorch.core.errors import DtorchError

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.\-]+|\*):(\d{1,5}|\*)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MEETING = "meeting.json"
"""The file, in the directory of a generation of workers, that tells them what ``cluster.executor`` wants to know."""
_MOST_WORKERS = 1024  # of one machine


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if not found:
        raise ValueError("an address is tcp://HOST:PORT")
    if found[2] != "*" and int(found[2]) > 65535:
        raise ValueError(f"there is no port {found[2]}: they end at 65535")
    return text


def _bytes(value: Any) -> Any:
    """Bytes from text such as 8GiB, 512M or 1000."""
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", value) if isinstance(value, str) else None
    if isinstance(value, str) and found is None:
        raise ValueError("a size is a number with K, M, G or T behind it, as 8GiB")
    return int(found[1]) * _UNITS[found[2]] if found else value


def seconds(text: str) -> int:
    """Seconds from text such as 90s, 30m, 12h or 7d.

    Raises:
        DtorchError: this is no duration.
    """
    found = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if not found or not int(found[1]):
        raise DtorchError(f"{text!r}: a duration is a whole number from 1 to 999999999 with s, m, h or d behind it, as 7d.")
    return int(found[1]) * _SECONDS[found[2]]


def _devices(value: Any) -> Any:
    """Places for workers from ``cpu:4`` (four workers) or ``cuda:0,1`` (these GPUs)."""
    if not isinstance(value, str):
        return value
    kind, _, rest = value.partition(":")
    if kind == "cpu" and re.fullmatch(r"\d{1,4}", rest) and 1 <= int(rest) <= _MOST_WORKERS:
        return tuple(f"cpu:{i}" for i in range(int(rest)))
    if (
        kind == "cuda"
        and re.fullmatch(r"\d{1,3}(,\d{1,3})*", rest)
        and len(set(rest.split(","))) == rest.count(",") + 1
    ):
        return tuple(f"cuda:{int(i)}" for i in rest.split(","))
    raise ValueError("devices are cpu:COUNT or cuda:NUMBER,NUMBER,...")


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError("not a directory")
    return path.resolve()


Address = Annotated[str, AfterValidator(_address)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(gt=0)]
Slots = Annotated[tuple[str, ...], BeforeValidator(_devices)]
Directory = Annotated[Path, AfterValidator(_directory)]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ControllerOptions(_Options):
    """Of ``dtorch controller``.

    Attributes:
        listen: where to listen; port ``*``: any that is free.
        keys: see ``cluster.keys``.
        sessions: most sessions at a time.
        message: most bytes of one message of a client, which bounds an upload by pieces too.
        memory: most bytes of memory of a session's controller process.
        patience: how long, in seconds, a client is waited for of which nothing is heard although nobody has closed its
            connection, as when a network fails.
    """

    listen: Address
    keys: Directory
    sessions: int = Field(default=64, ge=1)
    message: Bytes = 256 << 20
    memory: Bytes = 8 << 30
    patience: float = Field(default=30.0, ge=5)


class WorkerOptions(_Options):
    """Of ``dtorch worker``.

    Attributes:
        controller: the address of the pool's controller.
        keys: see ``cluster.keys``.
        devices: places for workers, as ``("cpu:0", "cpu:1")``.
        file_roots: directories below which workers may read and write files; by default none.
        data_address: on which this machine's workers listen for those of others. What they send each other is not
            encrypted, so it must be one of a network that nobody else can reach; by default they meet on this machine only.
        memory: most bytes of memory of one worker.
        tensors: most tensors of one worker.
        scratch: a directory for snapshots; shared between machines, sessions survive the loss of a machine after one.
    """

    controller: Address
    keys: Directory
    devices: Slots = Field(min_length=1, max_length=_MOST_WORKERS)
    file_roots: tuple[Directory, ...] = ()
    data_address: str = "127.0.0.1"
    memory: Bytes = 1 << 40
    tensors: int = Field(default=1_000_000, ge=1)
    scratch: Directory | None = None


class ConnectOptions(_Options):
    """Of a client. ``name``: of its machine, for lists."""

    address: Address
    token: str = Field(min_length=1, max_length=4096, repr=False)
    keys: Directory
    device_type: str = Field(default="cpu", pattern="^[a-z]+$")
    restarts: int = Field(default=3, ge=0)
    log_operators: int = Field(default=30_000, ge=0)
    log_bytes: int = Field(default=1 << 30, ge=0)
    name: str = Field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")


def checked(kind: type[Any], **values: Any) -> Any:
    """Options of this kind; those that are ``None`` take their defaults.

    Raises:
        DtorchError: they are impossible; the text names all that are.
    """
    try:
        return kind(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, e['loc'][:1]))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
        ]
        raise DtorchError(". ".join(faults) + ".") from error
