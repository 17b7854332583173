"""Remote failures as sentences of the user's program."""

from __future__ import annotations

import torch

from dtorch.client.sites import Site, describe
from dtorch.core.errors import RemoteError

_BUILTIN: dict[str, type[Exception]] = {
    e.__name__: e
    for e in (
        IndexError, ValueError, TypeError, KeyError, NotImplementedError, OSError, FileNotFoundError, PermissionError,
        torch.OutOfMemoryError, torch.linalg.LinAlgError,  # type: ignore[attr-defined]
    )
}  # fmt: skip
_KINDS: dict[str, type[RemoteError]] = {}


def remote_error(
    op: str, device: str, kind: str, text: str, trace: str, inputs: list[str], site: Site | None
) -> RemoteError:
    """The exception for a failed operator; it is also an instance of the builtin exception that the worker raised."""
    where = describe(site) if site is not None else None
    name = op.replace("::", ".")
    reason = text.strip().partition("\n")[0]
    what = "out of memory" if kind == "OutOfMemoryError" else kind.removeprefix("_")
    message = (
        f"{name or 'a redistribution'} failed on device {device}"
        + (f", issued at {where}" if where else "")
        + f": {what}: {reason}"
        + (f" (on {', '.join(inputs)})" if inputs else "")
    )
    return _class_for(kind)(message, name, device, where, kind, trace)


def _class_for(kind: str) -> type[RemoteError]:
    builtin = _BUILTIN.get(kind)
    if builtin is None:
        return RemoteError
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Remote{kind}", (RemoteError, builtin), {"__doc__": f"A {kind} on a worker."})
    return _KINDS[kind]
