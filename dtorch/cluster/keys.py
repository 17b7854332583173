"""Keys (CURVE) of a pool: files with one text each, the secret ones readable by their owner alone.

A directory holds, as far as its machine needs them:

    server.key server.pub   the controller's; clients and workers know it by the public one
    token.key               what the controller signs tokens with
    revoked                 ids of tokens that are valid no more, one a line
    client*.key *.pub       of clients; worker*.key *.pub of workers. Whose public key is in the controller's directory
                            may connect, in that role
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import zmq

from dtorch.core.errors import DtorchError

ROLES = ("client", "worker")
_MODE = 0o600


class KeyFileError(DtorchError):
    """A file of keys that is missing, malformed or readable by others."""


@dataclass(frozen=True)
class Pair:
    """A key pair, in Z85."""

    public: bytes
    secret: bytes


def make(directory: Path, names: tuple[str, ...] = ("server", *ROLES)) -> list[Path]:
    """Make key pairs of these names, and the key for tokens beside the server's; returns the files.

    Raises:
        KeyFileError: there is one of that name already, or the name says no role.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    made: list[Path] = []
    for name in names:
        if name != "server" and not re.fullmatch(rf"({'|'.join(ROLES)})[0-9A-Za-z]*(-[0-9A-Za-z]+)*", name):
            raise KeyFileError(f"{name!r}: a key's name begins with {' or '.join(ROLES)}: letters, digits and hyphens.")
        public, secret = zmq.curve_keypair()
        made += [_write(directory / f"{name}.key", secret.decode()), _write(directory / f"{name}.pub", public.decode())]
        if name == "server":
            made.append(_write(directory / "token.key", secrets.token_hex(32)))
    return made


def pair(directory: Path, name: str) -> Pair:
    """The key pair of this name, or the only one whose name begins so.

    Raises:
        KeyFileError: there is none, or it is not to be trusted.
    """
    exact = directory / f"{name}.key"
    found = [exact] if exact.exists() else sorted(directory.glob(f"{name}*.key"))
    if len(found) != 1:
        raise KeyFileError(
            f"{directory} holds {len(found) or 'no'} keys for a {name}; `dtorch keys` makes them, and one is to be here."
        )
    secret = secret_text(found[0])
    try:
        return Pair(zmq.curve_public(secret.encode()), secret.encode())
    except (ValueError, zmq.ZMQError) as error:
        raise KeyFileError(f"{found[0]} holds no key: {error}") from error


def public(directory: Path, name: str) -> bytes:
    """The public key of this name.

    Raises:
        KeyFileError: there is none.
    """
    return _public(directory / f"{name}.pub")


def allowed(directory: Path, role: str) -> frozenset[bytes]:
    """The public keys with which one may connect in this role."""
    return frozenset(_public(path) for path in directory.glob(f"{role}*.pub"))


def secret_text(path: Path) -> str:
    """What a secret file holds.

    Raises:
        KeyFileError: it cannot be read, or others can read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise KeyFileError(f"{path} can be read by others: chmod 600 {path}")
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path} cannot be read: {error}") from error


def _public(path: Path) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"{path} cannot be read: {error}") from error
    if len(text) != 40:
        raise KeyFileError(f"{path} holds no public key.")
    return text


def _write(path: Path, text: str) -> Path:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    except FileExistsError as error:
        raise KeyFileError(f"{path} is there already; remove it to make another.") from error
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
    return path
