"""Tokens: who may start sessions, until when. Signed with the pool's key (HMAC-SHA256), so nothing is stored but the ids
of those that were revoked.

    base64url(json {"id", "expires", "name"}) "." base64url(signature)
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dtorch.cluster.keys import secret_text
from dtorch.core.errors import DtorchError

_MAX_TEXT = 4096


class TokenError(DtorchError):
    """A token that is forged, expired or revoked."""


class Token(BaseModel):
    """What a token says. ``expires``: seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    expires: int
    name: str = Field(max_length=200)


def issue(directory: Path, lifetime_s: float, name: str = "") -> str:
    """A new token that is valid for so long.

    Raises:
        KeyFileError: the key for tokens is not in the directory.
        TokenError: the name is not printable.
    """
    if not name.isprintable():
        raise TokenError(f"{name!r} cannot be a token's name: lists show it on one line")
    token = Token(id=secrets.token_hex(8), expires=int(time.time() + lifetime_s), name=name)
    body = _text(token.model_dump_json().encode())
    return f"{body}.{_text(_signature(directory, body))}"


def read(text: str) -> Token:
    """What a token says, whoever made it.

    Raises:
        TokenError: this is none.
    """
    try:
        body = text.split(".", maxsplit=1)[0] if len(text) <= _MAX_TEXT else ""
        return Token.model_validate(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
    except (ValueError, binascii.Error, ValidationError, RecursionError) as error:
        raise TokenError("this is no token; `dtorch token`, on the controller's machine, makes one") from error


def check(directory: Path, text: str) -> Token:
    """The token, if it was made with this directory's key and is valid now.

    Raises:
        TokenError: it is not; the text says why.
        KeyFileError: as ``issue``.
    """
    token = read(text)
    body, _, signature = text.partition(".")
    if not hmac.compare_digest(_text(_signature(directory, body)).encode(), signature.encode("utf-8", "replace")):
        raise TokenError("the token was not made by this pool's controller")
    if token.expires <= time.time():
        raise TokenError(f"the token {token.id} has expired")
    if token.id in revoked(directory):
        raise TokenError(f"the token {token.id} was revoked")
    return token


def revoke(directory: Path, text: str) -> str:
    """Make a token invalid, given itself or its id; sessions that run with it are ended. Returns the id.

    Raises:
        TokenError: this is neither.
    """
    known = text if len(text) == 16 and not set(text) - set("0123456789abcdef") else read(text).id
    with open(directory / "revoked", "a", encoding="ascii") as file:
        file.write(known + "\n")
    return known


def revoked(directory: Path) -> frozenset[str]:
    """The ids of the tokens that were revoked."""
    path = directory / "revoked"
    return frozenset(path.read_text(encoding="ascii").split()) if path.exists() else frozenset()


def _signature(directory: Path, body: str) -> bytes:
    key = bytes.fromhex(secret_text(directory / "token.key"))
    return hmac.digest(key, b"dtorch token 1 " + body.encode("utf-8", "replace"), hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
