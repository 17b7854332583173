"""Message header to bytes and back. Pure; checks every type and bound in both directions.

A header is the msgpack list ``[kind, *fields]``. What arrives may be anything: decoding either gives a valid message or
raises ``ProtocolError``, in time and memory bounded by ``MAX_HEADER_BYTES``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from dtorch.core.errors import ProtocolError
from dtorch.protocol.messages import Message, WorkerInfo

MAX_HEADER_BYTES = 1 << 20
MAX_ITEMS = 8192
MAX_TEXT = 1 << 16
"""Characters in one text field."""

_MAX_INT = 2**63 - 1
_Check = Callable[[Any, str], Any]
M = TypeVar("M")


def clip(text: str) -> str:
    """The end of a text of any length and origin, such that it fits in a text field."""
    return text[-MAX_TEXT:].encode("utf-8", "replace").decode("utf-8")


class Codec:
    """Headers of the messages of one union."""

    def __init__(self, union: Any) -> None:
        self._kinds: dict[int, Any] = {kind.KIND: kind for kind in get_args(union)}
        self._fields: dict[Any, list[tuple[str, _Check]]] = {k: _field_checkers(k) for k in self._kinds.values()}

    def encode(self, message: Any) -> bytes:
        """As ``encode``."""
        kind = type(message)
        values = [kind.KIND]
        for name, check in self._fields[kind]:
            values.append(check(getattr(message, name), name))
        try:
            header: bytes = _pack(values)
        except ValueError as error:  # text with lone surrogates
            raise ProtocolError(f"{kind.__name__} holds text that is not valid Unicode: {error}") from error
        if len(header) > MAX_HEADER_BYTES:
            raise ProtocolError(f"{kind.__name__} takes {len(header)} bytes, the limit is {MAX_HEADER_BYTES}")
        return header

    def decode(self, header: bytes | bytearray | memoryview) -> Any:
        """As ``decode``."""
        if len(header) > MAX_HEADER_BYTES:
            raise ProtocolError(f"a header of {len(header)} bytes, the limit is {MAX_HEADER_BYTES}")
        try:
            values = msgpack.unpackb(header, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise ProtocolError(f"a header is not msgpack: {type(error).__name__}: {error}") from error
        if type(values) is not list or not values or type(values[0]) is not int:
            raise ProtocolError("a header is a list that begins with the number of its kind")
        kind = self._kinds.get(values[0])
        if kind is None:
            raise ProtocolError(f"there is no message of kind {values[0]}")
        specs = self._fields[kind]
        if len(values) != len(specs) + 1:
            raise ProtocolError(f"{kind.__name__} has {len(specs)} fields, not {len(values) - 1}")
        return kind(*[check(value, name) for (name, check), value in zip(specs, values[1:], strict=True)])


def encode(message: Message) -> bytes:
    """The header frame of a message.

    Raises:
        ProtocolError: a field has a wrong type or is out of bounds; the text names it.
    """
    return _codec.encode(message)


def decode(header: bytes | bytearray | memoryview) -> Message:
    """The message of a header frame.

    Raises:
        ProtocolError: this is no valid header.
    """
    message: Message = _codec.decode(header)
    return message


def decode_as(expected: type[M], header: bytes | bytearray | memoryview) -> M:
    """The message of a header frame that must be of one kind.

    Raises:
        ProtocolError: this is no valid header, or of another kind.
    """
    message = decode(header)
    if not isinstance(message, expected):
        raise ProtocolError(f"expected {expected.__name__}, got {type(message).__name__}")
    return message


def _check_int(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise ProtocolError(f"{where} must be an integer from 0 to 2**63 - 1, not {value!r:.80}")
    return value


def _check_text(value: Any, where: str) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ProtocolError(f"{where} must be text of at most {MAX_TEXT} characters, not {value!r:.80}")
    return value


def _check_table(value: Any, where: str) -> dict[str, str]:
    if type(value) is not dict or len(value) > MAX_ITEMS:
        raise ProtocolError(f"{where} must be a table of at most {MAX_ITEMS} entries, not {value!r:.80}")
    return {_check_text(k, f"a key of {where}"): _check_text(v, f"{where}[{k!r:.80}]") for k, v in value.items()}


def _check_sequence(value: Any, where: str, item: _Check) -> tuple[Any, ...]:
    if type(value) not in (list, tuple) or len(value) > MAX_ITEMS:
        raise ProtocolError(f"{where} must be a list of at most {MAX_ITEMS} items, not {value!r:.80}")
    return tuple([item(v, where) for v in value])


def _row(info: Any) -> list[Any]:
    if type(info) is not WorkerInfo:
        raise TypeError(f"no message can hold {info!r:.80}")
    return [getattr(info, field.name) for field in fields(info)]


def _check_row(value: Any, where: str, specs: list[tuple[str, _Check]]) -> WorkerInfo:
    row = _row(value) if type(value) is WorkerInfo else value
    if type(row) is not list or len(row) != len(specs):
        raise ProtocolError(f"a row of {where} must be a list of {len(specs)} fields, not {value!r:.80}")
    return WorkerInfo(*[check(v, f"{where}.{name}") for (name, check), v in zip(specs, row, strict=True)])


def _checker(annotation: Any) -> _Check:
    """The function that checks and normalises a field of this type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is int:
        return _check_int
    if annotation is str:
        return _check_text
    if annotation == dict[str, str]:
        return _check_table
    if annotation is WorkerInfo:
        specs = _field_checkers(WorkerInfo)
        return lambda value, where: _check_row(value, where, specs)
    if origin is tuple and arguments[1:] == (...,):
        item = _checker(arguments[0])
        return lambda value, where: _check_sequence(value, where, item)
    if origin in (Union, types.UnionType) and arguments[1:] == (type(None),):
        present = _checker(arguments[0])
        return lambda value, where: None if value is None else present(value, where)
    raise TypeError(f"no message field can be {annotation}")


def _field_checkers(kind: type) -> list[tuple[str, _Check]]:
    hints = get_type_hints(kind)
    return [(field.name, _checker(hints[field.name])) for field in fields(kind)]


_pack = msgpack.Packer(default=_row).pack
_codec = Codec(Message)
