"""What is kept of a save, for workers that take the place of others."""

from __future__ import annotations

from typing import Any

import msgpack

from dtorch.controller.stream import FREE, Reader, needed, remaining
from dtorch.protocol import commands as C

SAVE = [C.PUT, 7, 0, 1, C.SAVE, 3, "/there", C.WRITE, 3, "state.safetensors", 7, 0, 64, [0], True, -7]


def kept(commands: list[Any]) -> tuple[list[int], list[int]]:
    """The commands that a shortened log has, and those that are repeated after a snapshot."""
    reader = Reader(lambda path, offset, count: b"")
    nodes = reader.read([msgpack.packb(commands), b"values"])
    steps = needed(nodes, {})
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return [node.code for node in end.value], [node.code for node in remaining(nodes)]


def test_an_unfinished_save_keeps_what_it_reads() -> None:
    assert kept(SAVE) == ([C.PUT, C.SAVE, C.WRITE, FREE], [C.SAVE])


def test_a_finished_one_keeps_nothing() -> None:
    assert kept([*SAVE, C.SAVE, 3, None]) == ([], [])
