"""Every message survives the way over the wire; nothing else gets through."""

import tracemalloc
import types
from dataclasses import fields
from typing import Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtorch.core.errors import ProtocolError
from dtorch.protocol.codec import MAX_HEADER_BYTES, MAX_TEXT, clip, decode, decode_as, encode
from dtorch.protocol.messages import Ack, AddWorker, Batch, Fault, Message, WorkerInfo, WorkerList

KINDS = get_args(Message)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.integers(0, 2**63 - 1)


def values_of(annotation):
    if annotation is int:
        return NUMBER
    if annotation is str:
        return TEXT
    if annotation == dict[str, str]:
        return st.dictionaries(TEXT, TEXT, max_size=3)
    if annotation is WorkerInfo:
        return messages_of(WorkerInfo)
    if get_origin(annotation) is tuple:
        return st.lists(values_of(get_args(annotation)[0]), max_size=4).map(tuple)
    assert get_origin(annotation) in (Union, types.UnionType)
    return st.none() | values_of(get_args(annotation)[0])


def messages_of(kind):
    hints = get_type_hints(kind)
    return st.builds(kind, **{f.name: values_of(hints[f.name]) for f in fields(kind)})


ANY_MESSAGE = st.one_of([messages_of(kind) for kind in KINDS])
ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(ANY_MESSAGE)
def test_round_trip(message):
    assert decode(encode(message)) == message


def test_every_kind_has_its_own_number_and_a_docstring():
    assert len({kind.KIND for kind in KINDS}) == len(KINDS)
    assert all(kind.__doc__ for kind in KINDS)


@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")  # a list of 2**32 - 1 items
@example(b"\xc6\xff\xff\xff\xff")  # as many bytes
@example(b"\xd6\xff\x00\x00\x00\x00")  # a timestamp
@example(b"\x81\x90\x01")  # a key that is a list
@example(b"\x91" * 5000)
@example(b"\xa2\xff\xff")  # not UTF-8
@example(b"")
def test_bytes_give_a_message_or_a_protocol_error(data):
    try:
        assert isinstance(decode(data), KINDS)
    except ProtocolError:
        return


@settings(max_examples=300)
@given(st.sampled_from(KINDS), st.lists(ANY_VALUE, max_size=5))
def test_values_give_a_message_or_a_protocol_error(kind, values):
    try:
        message = decode(msgpack.packb([kind.KIND, *values]))
    except ProtocolError:
        return
    assert decode(encode(message)) == message


@settings(max_examples=200)
@given(ANY_MESSAGE, st.data())
def test_a_damaged_header_gives_a_message_or_a_protocol_error(message, data):
    header = bytearray(encode(message))
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(header)
    except ProtocolError:
        return


def test_garbage_takes_no_memory():
    nested = b"\xdc\x20\x00" * (MAX_HEADER_BYTES // 3)  # each list promises 8192 items, the first of which is a list
    tracemalloc.start()
    for data in (nested, b"\xdd\x00\x0f\xff\xff" * 200_000, b"\xdf\x00\x0f\xff\xff" * 200_000):
        with pytest.raises(ProtocolError):
            decode(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Ack(-1), "seq must be an integer"),
        (Ack(2**63), "seq must be an integer"),
        (Ack(True), "seq must be an integer"),
        (Ack("1"), "seq must be an integer"),
        (Batch(1, (1, None)), "targets must be an integer"),
        (Batch(1, 3), "targets must be a list"),
        (AddWorker((0,), 1, {"A": 1}), r"env\['A'\] must be text"),
        (Fault(None, "x" * (MAX_TEXT + 1)), "text must be text of at most"),
        (Fault(None, "\udc80"), "not valid Unicode"),
        (WorkerList(((1, 2),)), "a row of workers"),
        (AddWorker((0,), 1, {f"K{i}": "x" * MAX_TEXT for i in range(20)}), "the limit is"),
    ],
)
def test_what_cannot_be_sent_is_named(message, words):
    with pytest.raises(ProtocolError, match=words):
        encode(message)


def test_decode_as_wants_one_kind():
    assert decode_as(Ack, encode(Ack(3))) == Ack(3)
    with pytest.raises(ProtocolError, match="expected Batch, got Ack"):
        decode_as(Batch, encode(Ack(3)))
    with pytest.raises(ProtocolError, match="the limit is"):
        decode(bytes(MAX_HEADER_BYTES + 1))


@given(st.text())
def test_clipped_text_always_fits(text):
    message = Fault(None, clip(text * 3))
    assert decode(encode(message)) == message
