"""Errors of the command line: one line on stderr that says what to do next.

    typer.TyperException
    └── CliError
        ├── InputError    exit code 2: what the user typed cannot work
        └── FailureError  exit code 1: it could have worked, but did not

An interrupt from the keyboard ends a command with 130, as shells have it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from dtorch.core.errors import PlacementError
from dtorch.models import ModelInputError


class CliError(typer.TyperException):
    """An error that ends the command with its text on one line."""


class InputError(CliError):
    """What the user typed cannot work."""

    exit_code = 2


class FailureError(CliError):
    """Something that could have worked did not."""

    exit_code = 1


@contextmanager
def one_line_errors(debug: bool) -> Iterator[None]:
    """Turn every exception of the block into a CliError, after its traceback on stderr if `debug` is set."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, CliError):
            raise
        if isinstance(error, (ModelInputError, PlacementError)):
            raise InputError(str(error)) from error
        text = f"{type(error).__name__}: {error}"
        raise FailureError(text if debug else f"{text.rstrip('.')}. Add --debug for the traceback.") from error


class OneLineGroup(TyperGroup):
    """A command group whose errors, Typer's own included, are one line each."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command; in standalone mode, the usual one, end the process with its exit code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            result = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            sys.exit(130)
        except typer.TyperException as error:
            typer.echo(f"Error: {_one_line(error)}", err=True)
            sys.exit(error.exit_code)
        sys.exit(result if isinstance(result, int) else 0)


def _one_line(error: typer.TyperException) -> str:
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    return f"{text.rstrip('.')}. See '{context.command_path} --help'."
