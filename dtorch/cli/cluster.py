"""`dtorch keys`, `dtorch token`, `dtorch controller`, `dtorch worker`: a pool of machines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dtorch.cli.errors import InputError, one_line_errors

KeysOption = Annotated[Path, typer.Option("--keys", help="Directory of keys.", envvar="DTORCH_KEYS")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def keys(
    directory: Annotated[Path, typer.Option("--dir", help="Where to put them.")] = Path("keys"),
    name: Annotated[
        list[str] | None, typer.Option(help="One more key: a name that begins with client or worker.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make the keys of a pool: of its controller, its clients and its workers.

    The controller's machine needs the whole directory; a client server.pub and client.key; a worker server.pub and
    worker.key. Copy them over a safe way: the .key files are secret.
    """
    from dtorch.cluster.keys import make

    with one_line_errors(debug):
        for path in make(directory, tuple(name)) if name else make(directory):
            typer.echo(path)


def token(
    directory: KeysOption = Path("keys"),
    expires: Annotated[str, typer.Option(help="For how long it is valid: 12h, 7d.")] = "7d",
    name: Annotated[str, typer.Option(help="Whose it is, for lists.")] = "",
    revoke: Annotated[
        str | None, typer.Option(help="Make this token, or the one with this id, invalid instead.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Make a token, with which a client may start sessions; or revoke one, which ends its sessions."""
    from dtorch.cluster import tokens
    from dtorch.cluster.options import seconds

    with one_line_errors(debug):
        if revoke is not None:
            typer.echo(f"{tokens.revoke(directory, revoke)} is revoked")
        else:
            typer.echo(tokens.issue(directory, seconds(expires), name[:200]))


def controller(
    listen: Annotated[str, typer.Option(help="Address, as tcp://0.0.0.0:7077; port * takes a free one.")],
    directory: KeysOption = Path("keys"),
    sessions: Annotated[int | None, typer.Option(help="Most sessions at a time.")] = None,
    message: Annotated[str | None, typer.Option(help="Most bytes of one message of a client, as 256M.")] = None,
    memory: Annotated[str | None, typer.Option(help="Most bytes of memory of a session's controller, as 8G.")] = None,
    patience: Annotated[float | None, typer.Option(help="Seconds for which a client's network may fail.")] = None,
    debug: DebugOption = False,
) -> None:
    """Be the controller of a pool: workers and clients connect here, each session gets a process of its own."""
    from dtorch.cluster.options import ControllerOptions, checked

    with one_line_errors(debug):
        options = checked(
            ControllerOptions, listen=listen, keys=directory, sessions=sessions, message=message, memory=memory,
            patience=patience,
        )  # fmt: skip
        from dtorch.cluster.gate import run

        run(options, _say)


def worker(
    controller: Annotated[str, typer.Option(help="Address of the pool's controller, as tcp://HOST:7077.")],
    directory: KeysOption = Path("keys"),
    devices: Annotated[str, typer.Option(help="cpu:COUNT workers, or cuda:NUMBER,NUMBER,... one a GPU.")] = "cpu:1",
    file_roots: Annotated[
        list[Path] | None, typer.Option(help="Directory below which workers may read and write files.")
    ] = None,
    data_address: Annotated[
        str | None,
        typer.Option(help="This machine's address in a private network: where workers exchange tensors, unencrypted."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Most bytes of memory of one worker, as 64G.")] = None,
    tensors: Annotated[int | None, typer.Option(help="Most tensors of one worker.")] = None,
    scratch: Annotated[Path | None, typer.Option(help="Directory for snapshots, if machines share one.")] = None,
    debug: DebugOption = False,
) -> None:
    """Offer this machine's devices to a pool."""
    from dtorch.cluster.options import WorkerOptions, checked

    with one_line_errors(debug):
        options = checked(
            WorkerOptions, controller=controller, keys=directory, devices=devices, file_roots=file_roots,
            data_address=data_address, memory=memory, tensors=tensors, scratch=scratch,
        )  # fmt: skip
        if "torch" in sys.modules:
            raise InputError("`dtorch worker` is a program of its own: it must not be called where torch is imported.")
        from dtorch.cluster.agent import run

        run(options, _say)


def _say(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()
