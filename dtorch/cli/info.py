"""`dtorch info`: what is installed here and what it would run on."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtorch.cli.errors import one_line_errors

if TYPE_CHECKING:
    from dtorch.core.config import SessionConfig

PACKAGES = ("torch", "diffusers", "transformers", "pyzmq")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show versions, devices, the mode, the native part and the patches."""
    with one_line_errors(debug):
        facts = _facts()
    if as_json:
        typer.echo(json.dumps(facts))
        return
    patches = facts.pop("patches")
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:{width}}  {', '.join(value) if isinstance(value, list) else value}")
    typer.echo("patches")
    for patch in patches:
        typer.echo(f"  {patch['name']}  ({patch['library']} {patch['versions']}): {patch['reason']}")


def _facts() -> dict[str, Any]:
    import dtorch
    from dtorch.core.config import from_environment

    config = from_environment()
    return {
        "dtorch": dtorch.__version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "mode": config.mode,
        **({"pool": _pool(config)} if config.mode == "cluster" else {}),
        "native part": _native_part(),
        "patches": _patches(),
    }


def _pool(config: SessionConfig) -> list[str]:
    """The pool's places for workers, with how many there are, and its sessions."""
    from dtorch.cluster.bridge import look
    from dtorch.cluster.options import ConnectOptions, checked

    found = look(checked(ConnectOptions, address=config.address, token=config.token, keys=config.keys))
    return [*found.slots, *(f"session {session}" for session in found.sessions)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    """The CPU, and the devices of every accelerator that torch can use in this process."""
    import torch

    devices = [f"cpu ({os.cpu_count()} cores)"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != "dtorch":
        devices += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    return devices


def _native_part() -> str:
    """The file of the native part, looked for where `dtorch.native.load` would, without building it."""
    from dtorch.native import build

    torch = build.find_torch()
    if torch is None:
        return "not built: torch is missing"
    name = build.library_name(torch)
    for path in (build.SOURCE.with_name(name), build.cache_folder() / name):
        if path.is_file():
            return f"built: {path}"
    return "not built; the first use builds it where there is a C++ compiler"


def _patches() -> list[dict[str, str]]:
    """Every patch that there is of other libraries; none is in force before `dtorch.patch()` or `dtorch exec`."""
    from dtorch.patches import available

    return [
        {"name": p.name, "library": p.library, "versions": p.version_range, "reason": p.reason} for p in available()
    ]
