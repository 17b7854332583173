"""Files that the workers read for themselves, in place of an upload.

A plain tensor whose memory is a file's, mapped and not written to since (so safetensors, ``torch.load(mmap=True)`` and
everything built on them hand out weights), is not read here at all: the workers get path and offset. The kernel tells
which memory that is, so this holds for every library that maps files, and never for memory that has been changed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy
import torch

from dtorch.core.config import check_roots
from dtorch.core.spec import TensorSpec
from dtorch.protocol import commands as C
from dtorch.protocol.values import dtype_name

if TYPE_CHECKING:
    from dtorch.client.session import Session
    from dtorch.client.sites import Site

_MOST_OPEN = 16
# A page of a private mapping still shows the file when it is absent, or present and the file's (pagemap, bits 61 to 63).
_ABSENT, _OF_FILE = 0, 5


class RefusedError(OSError):
    """Workers cannot, or must not, read a file. ``forbidden``: it lies outside of what they may read."""

    def __init__(self, text: str, forbidden: bool) -> None:
        super().__init__(text)
        self.forbidden = forbidden


@dataclass
class _Mapping:
    """Addresses of this process that show a file. ``witness`` keeps them mapped."""

    low: int
    high: int
    offset: int
    witness: Any = field(repr=False)


@dataclass
class _Entry:
    """A file that the workers have open."""

    number: int
    path: str
    workers: int
    mappings: list[_Mapping] = field(default_factory=list)


class OpenFiles:
    """The files that a session's workers have open for it: the last few, and none while nothing happens."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._numbers = itertools.count(1)  # 0 is the arena
        self._entries: OrderedDict[tuple[int, ...], _Entry] = OrderedDict()
        self._refused: dict[tuple[int, ...], RefusedError] = {}
        self._lock = threading.Lock()

    def load(
        self, tensor_id: int, spec: TensorSpec, path: str, offset: int, dtype: torch.dtype, name: str, site: Site
    ) -> None:
        """Append the loading of a tensor that a file holds, row-major, from ``offset`` bytes on.

        Args:
            tensor_id, spec: what is made; the spec has row-major strides.
            path: absolute, links resolved.
            dtype: of the elements in the file.
            name: for errors.
            site: of the user's call.

        Raises:
            RefusedError: the workers cannot read it; nothing was appended.
            OSError: there is no such file.
        """
        with self._lock:
            entry = self._opened(path)
            self._emit(tensor_id, spec, entry, offset, dtype, name, site)

    def load_mapped(self, tensor_id: int, spec: TensorSpec, t: torch.Tensor, site: Site) -> bool:
        """The same for a plain tensor whose memory shows a file; whether it does, and the workers can read that."""
        plain = t.is_contiguous() and not t.is_conj() and not t.is_neg()
        if not (sys.platform == "linux" and plain and spec.is_contiguous):
            return False
        low = t.data_ptr()
        high = low + t.numel() * t.element_size()
        try:
            if not _is_untouched(low, high):
                return False
            with self._lock:
                found = self._shown(low, high, t)
                if found is None:
                    return False
                entry, offset = found
                self._emit(tensor_id, spec, entry, offset, t.dtype, f"bytes from {offset} of {entry.path}", site)
        except OSError:  # refused, vanished, or a kernel without these tables: its bytes can still be sent
            return False
        return True

    def forget(self) -> bool:
        """Close all files; whether there were any. Does nothing while one is being opened."""
        if not self._entries or not self._lock.acquire(blocking=False):
            return False
        try:
            while self._entries:
                self._drop(next(iter(self._entries)))
        finally:
            self._lock.release()
        return True

    def _emit(
        self, tensor_id: int, spec: TensorSpec, entry: _Entry, offset: int, dtype: torch.dtype, name: str, site: Site
    ) -> None:
        session = self._session
        with session.lock:
            number = session.spec_id(spec)
            session.sites.append(site)
            whole = [(0, n) for n in spec.shape]
            session.buf.extend((C.LOAD, tensor_id, number, entry.number, offset, dtype_name(dtype), whole, name))
        session.emitted()

    def _opened(self, path: str) -> _Entry:
        """The entry of a file, opened by all workers there are now."""
        seen = os.stat(path)
        key = (seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns)
        entry = self._entries.get(key)
        workers = self._session.worker_count
        if entry is not None and entry.workers == workers:
            self._entries.move_to_end(key)
            return entry
        if key in self._refused:
            raise self._refused[key]
        entry = self._entries.setdefault(key, _Entry(next(self._numbers), path, workers))
        entry.workers = workers
        try:
            self._ask(entry, seen)
        except RefusedError as e:
            self._drop(key)
            self._refused[key] = e
            raise
        except BaseException:
            self._drop(key)
            raise
        while len(self._entries) > _MOST_OPEN:
            self._drop(next(iter(self._entries)))
        return entry

    def _ask(self, entry: _Entry, seen: os.stat_result) -> None:
        session = self._session
        try:
            check_roots(entry.path, session.config.file_roots)
        except PermissionError as e:
            raise RefusedError(str(e), forbidden=True) from e
        number, request = session.request(entry.workers)
        session.buf.extend((C.OPEN, number, entry.number, entry.path, seen.st_size, seen.st_mtime_ns))
        session.shares = True  # the file may be removed later, as memory may be used again
        session.flush()
        session.wait(request, None)
        if request.error is not None:
            raise request.error
        for kind, text in request.refusals:
            raise RefusedError(text, forbidden=kind == "PermissionError" and "outside of the directories" in text)

    def _drop(self, key: tuple[int, ...]) -> None:
        entry = self._entries.pop(key)
        self._session.buf.extend((C.CLOSE, entry.number))

    def _shown(self, low: int, high: int, t: torch.Tensor) -> tuple[_Entry, int] | None:
        """The open file that memory shows, and the offset in it."""
        for entry in self._entries.values():
            for m in entry.mappings:
                if m.low <= low and high <= m.high:
                    return self._current(entry), low - m.low + m.offset
        found = _mapping_of(low, high)
        if found is None:
            return None
        path, mapping = found
        mapping.witness = t.untyped_storage()
        entry = self._opened(path)
        entry.mappings.append(mapping)
        return entry, low - mapping.low + mapping.offset

    def _current(self, entry: _Entry) -> _Entry:
        """The entry of a mapped file, asked anew when the file has been written or workers have joined since."""
        key = next(k for k, e in self._entries.items() if e is entry)
        if not _is_at(entry.path, key[:2]):  # it was removed or replaced; who has it open still can read it
            if entry.workers == self._session.worker_count:
                return entry
            raise FileNotFoundError(f"{entry.path} is gone")
        new = self._opened(entry.path)
        if new is not entry:
            new.mappings.extend(entry.mappings)
            self._drop(key)
        return new


def _is_untouched(low: int, high: int) -> bool:
    """Whether no page of these addresses is private memory, as those are that have been written to."""
    first, last = low // mmap.PAGESIZE, (high - 1) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        pages.seek(first * 8)
        states = numpy.frombuffer(pages.read((last - first + 1) * 8), dtype=numpy.uint64) >> numpy.uint64(61)
    return len(states) == last - first + 1 and bool(((states == _ABSENT) | (states == _OF_FILE)).all())


def _mapping_of(low: int, high: int) -> tuple[str, _Mapping] | None:
    """The private mapping of a file that covers these addresses, and the file's path, if it still is at that path."""
    with open("/proc/self/maps", "rb") as maps:
        for line in maps:
            span, permissions, offset, device, inode, *path = line.rstrip(b"\n").split(None, 5)
            start, end = (int(x, 16) for x in span.split(b"-"))
            if not start <= low < end:
                continue
            if high > end or permissions[3:4] != b"p" or inode == b"0" or not path:
                return None
            name = os.fsdecode(path[0])
            major, minor = (int(x, 16) for x in device.split(b":"))
            if not _is_at(name, (os.makedev(major, minor), int(inode))):
                return None
            return name, _Mapping(start, end, int(offset, 16), None)
    return None


def _is_at(path: str, file: tuple[int, ...]) -> bool:
    """Whether the path leads to the file of this device and inode number."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == file
