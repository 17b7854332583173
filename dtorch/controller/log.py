"""What must be kept to make every value of a session again: its batches, shortened to what still matters. Pure.

The log starts from nothing or from a snapshot, in which every worker wrote down what it held. Then come nodes that were
needed when the log was last shortened, and then whole batches as the client sent them. Dead values go when the log is
shortened; what lives on through ever more commands, as weights in training do, needs a snapshot from time to time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dtorch.comm.channel import Buffer
from dtorch.controller.stream import Hold, Node, Reader, ReadShared, families, needed, remaining, write
from dtorch.core.errors import ProtocolError
from dtorch.protocol.codec import encode
from dtorch.protocol.messages import Batch

Frames = Sequence[Buffer]

_SHORTEN_BATCHES = 512
_OPERATORS_A_BATCH = 32  # roughly
_NODE_BYTES = 400  # about what one takes without the bytes that it brings
_NODES_A_BATCH = 4096  # of a replay
_FRAMES_A_BATCH = 1024
_BYTES_A_BATCH = 64 << 20


@dataclass(slots=True)
class _Entry:
    """A batch, header included, and the workers that it is for."""

    seq: int
    indexes: tuple[int, ...]
    frames: Frames
    nbytes: int
    nodes: list[Node] | None = None


class Log:
    """The log of one session.

    Args:
        most_operators, most_bytes: above either a snapshot is wanted.
        directory: where snapshots lie.
        read_shared: reads the client's shared memory.
        hold: keeps files that workers read, see ``stream.Hold``.

    Attributes:
        fault: why nothing can be repeated from this log, if so.
    """

    def __init__(
        self, most_operators: int, most_bytes: int, directory: str, read_shared: ReadShared, hold: Hold = lambda path: None
    ) -> None:
        self.fault = ""
        self._most_operators, self._most_bytes, self._directory = most_operators, most_bytes, directory
        self._reader = Reader(read_shared, hold)
        self._snapshot: int | None = None
        self._saved: frozenset[int] = frozenset()  # workers that have one
        self._held: dict[int, int] = {}  # what the snapshot holds, see `stream.families`
        self._nodes: list[Node] = []
        self._serial = 0  # of the first operator after `_nodes`
        self._entries: deque[_Entry] = deque()
        self._unread: deque[_Entry] = deque()  # those of the entries that were not taken apart yet
        self._least = min(_SHORTEN_BATCHES, most_operators // _OPERATORS_A_BATCH + 1)
        self._shorten_at = self._least
        self._shared: deque[_Entry] = deque()  # those that name memory that is not copied yet, or files
        self._work: Iterator[None] | None = None
        self._operators = 0
        self._node_bytes = self._entry_bytes = 0

    def append(self, seq: int, indexes: tuple[int, ...], frames: Frames, shared: bool) -> None:
        """Note a batch that is sent to these workers; ``shared`` as in ``Batch``: then ``settle`` is to follow."""
        if self.fault:
            return
        entry = _Entry(seq, indexes, frames, _in_memory(frames))
        self._entries.append(entry)
        self._unread.append(entry)
        self._entry_bytes += entry.nbytes
        if shared:
            self._shared.append(entry)

    def settle(self) -> None:
        """Copy what batches name in the client's shared memory, and keep the files that they open.

        Before any of them is acknowledged to the client.
        """
        while self._shared:
            entry = self._shared.popleft()
            self._read(entry)
            nodes = entry.nodes or []
            if any(node.frame is not None or node.held is not None for node in nodes):
                entry.frames = [entry.frames[0], *write(nodes)]
                self._entry_bytes -= entry.nbytes
                entry.nbytes = _in_memory(entry.frames)
                self._entry_bytes += entry.nbytes

    # Repeating

    def past(self, index: int, done: int) -> Iterator[Frames]:
        """Batches, for a worker that starts from the snapshot, that bring it to where it had done batch ``done``."""
        for number, frames in enumerate(self._shortened()):
            yield [encode(Batch(number, None)), *frames]
        yield from (entry.frames for entry in self._entries if entry.seq <= done and index in entry.indexes)

    def open(self, index: int, done: int) -> Iterator[Frames]:
        """The batches for a worker after batch ``done``."""
        yield from (entry.frames for entry in self._entries if entry.seq > done and index in entry.indexes)

    def snapshot_path(self, index: int) -> str:
        """The snapshot of this worker from which the log starts, if there is one."""
        return "" if self._snapshot is None or index not in self._saved else self.path(self._snapshot, index)

    def path(self, number: int, index: int) -> str:
        """Where a snapshot of a worker is written."""
        return f"{self._directory}/{number}-{index}"

    def _shortened(self) -> Iterator[list[Buffer]]:
        """The payloads of batches with the nodes, and the number of the next operator."""
        begin = frames = brought = serial = 0
        for i, node in enumerate(self._nodes):
            if i - begin == _NODES_A_BATCH or frames == _FRAMES_A_BATCH or brought > _BYTES_A_BATCH:
                yield write(self._nodes[begin:i], serial)
                begin, frames, brought, serial = i, 0, 0, -1
            if node.frame is not None:
                frames, brought = frames + 1, brought + len(node.frame)
        yield write(self._nodes[begin:], serial, self._serial)

    # Keeping it short

    def tend(self, done: int) -> None:
        """Begin to shorten the log when that pays; all workers have done all batches up to ``done``."""
        if self._work is None and (len(self._entries) >= self._shorten_at or self._entry_bytes > self._most_bytes):
            self._work = self._shorten(done)

    def work(self) -> None:
        """Go on with it, for less than a millisecond."""
        if self._work is not None and next(self._work, True):
            self._work = None

    @property
    def has_work(self) -> bool:
        """Whether there is any."""
        return self._work is not None

    @property
    def is_behind(self) -> bool:
        """Whether the work must go on even while there is other work."""
        return self._work is not None and len(self._entries) > 4 * self._shorten_at

    def shorten(self, done: int) -> None:
        """All of it at once."""
        self._work = self._shorten(done)
        while self.has_work:
            self.work()

    def _shorten(self, done: int) -> Iterator[None]:
        """Drop what no living value depends on, of the batches up to ``done``."""
        nodes = list(self._nodes)
        for entry in [entry for entry in self._entries if entry.seq <= done]:  # others come meanwhile
            if entry.nodes is None:
                self._read(entry)
                yield
            nodes.extend(entry.nodes or ())
        kept = yield from needed(nodes, self._held)
        if self._take(done) is None:
            return
        self._nodes = kept
        self._count()
        # Each time all nodes are looked at, so not before about as many have come.
        self._shorten_at = max(self._least, self._operators // _OPERATORS_A_BATCH)

    @property
    def is_long(self) -> bool:
        """Whether a snapshot is wanted."""
        return not self.fault and (self._operators > self._most_operators or self.is_large)

    @property
    def is_large(self) -> bool:
        """Whether a snapshot is wanted, whatever it costs."""
        return not self.fault and self._node_bytes + self._entry_bytes > self._most_bytes

    def cut(self, done: int, number: int, workers: frozenset[int]) -> int | None:
        """Start from a snapshot that these workers, all there were, took when they had done batch ``done``.

        Returns:
            The number of a snapshot that is of no more use.
        """
        nodes = self._take(done)
        if nodes is None:
            return number
        self._work = None
        nodes = self._nodes + nodes
        self._held, self._nodes = families(nodes, self._held), remaining(nodes)
        self._count()
        last, self._snapshot, self._saved = self._snapshot, number, workers
        return last

    def give_up(self, why: str) -> None:
        """Keep nothing any more."""
        self.fault, self._work = why, None
        self._nodes, self._held = [], {}
        self._entries.clear()
        self._unread.clear()
        self._shared.clear()
        self._entry_bytes = self._node_bytes = self._operators = 0

    def _take(self, done: int) -> list[Node] | None:
        """The nodes of the batches up to ``done``, which are taken out."""
        self._read()
        if self.fault:
            return None
        found: list[Node] = []
        while self._entries and self._entries[0].seq <= done:
            entry = self._entries.popleft()
            self._entry_bytes -= entry.nbytes
            found.extend(entry.nodes or ())
        self._serial = max([self._serial, *(node.serial + 1 for node in found)])
        return found

    def _read(self, last: _Entry | None = None) -> None:
        """Take the batches apart that were not yet, all or up to one of them."""
        try:
            while self._unread and (last is None or last.nodes is None):
                entry = self._unread[0]
                entry.nodes = self._reader.read(entry.frames[1:])
                self._unread.popleft()
        except (ProtocolError, OSError) as error:
            self.give_up(f"what it did cannot be repeated: {error}")

    def _count(self) -> None:
        self._operators = sum(node.serial >= 0 for node in self._nodes)
        brought = _in_memory(node.frame for node in self._nodes if node.frame is not None)
        self._node_bytes = brought + _NODE_BYTES * len(self._nodes)


def _in_memory(frames: Iterable[Buffer]) -> int:
    """Bytes that frames take in this process's memory; see ``ReadShared``."""
    return sum(len(frame) for frame in frames if not isinstance(frame, memoryview))
