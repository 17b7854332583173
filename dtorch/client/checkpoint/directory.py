"""The directory of a checkpoint: it grows beside its place, hidden, and takes it in one step.

The kernel exchanges two directories at once, so a path holds the old checkpoint or the new one and never neither or a
mixture. What an ended program has left beside it is known by its lock, which the kernel has dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from dtorch.core.errors import LoadError, SaveError

MANIFEST = "checkpoint.json"
_FORMAT = 1
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # fcntl.h, stdio.h
_OF_OTHERS = re.compile(r"\.metadata|__\d+_\d+\.distcp")  # torch.distributed.checkpoint's files
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV)


class Staging:
    """A checkpoint that is being written.

    Args:
        target: the directory that it is to become.

    Attributes:
        path: where it is written.

    Raises:
        SaveError: files at the target are no part of a checkpoint, and would be lost.
        OSError: the directory cannot be made.
    """

    def __init__(self, target: str) -> None:
        self._target = os.path.realpath(target)
        refuse_strangers(self._target)
        parent, name = os.path.split(self._target)
        os.makedirs(parent, exist_ok=True)
        _remove_abandoned(parent, name)
        self.path = os.path.join(parent, f".{name}.saving-{secrets.token_hex(4)}")
        os.mkdir(self.path)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for abandoned either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def create(self, file: str, begin: bytes, size: int) -> int:
        """A new file of ``size`` bytes that begins with these; returns its descriptor."""
        path = os.path.join(self.path, file)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, begin, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def commit(self, manifest: dict[str, Any]) -> None:
        """Bring everything to the disk, add the manifest, and put the directory in its place.

        Raises:
            OSError: that fails; what was there before is still there.
        """
        files = sorted(str(p.relative_to(self.path)) for p in Path(self.path).rglob("*") if p.is_file())
        sizes = {file: os.stat(os.path.join(self.path, file)).st_size for file in files}
        _sync_tree(self.path)
        with open(os.path.join(self.path, MANIFEST), "x", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "files": sizes, **manifest}, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.path)
        refuse_strangers(self._target)
        if os.path.isdir(self._target):
            if not _exchange(self.path, self._target):
                self._replace()
        else:
            os.rename(self.path, self._target)
        _sync(os.path.dirname(self._target))
        self.abandon()  # what is at this path now is the old one

    def _replace(self) -> None:
        """Where the kernel cannot exchange: in two steps, between which ``find`` takes the old one."""
        old = _beside(self._target, "previous")
        if os.path.isdir(old):
            shutil.rmtree(old)
        os.rename(self._target, old)
        os.rename(self.path, self._target)
        _sync(os.path.dirname(self._target))
        shutil.rmtree(old)

    def abandon(self) -> None:
        """Remove what is left beside the target. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)  # what cannot be removed now the next save removes
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def find(directory: str | os.PathLike[str]) -> str:
    """The directory of a complete checkpoint.

    Raises:
        LoadError: there is none.
    """
    for path in (os.path.realpath(directory), _beside(os.path.realpath(directory), "previous")):
        if any(os.path.isfile(os.path.join(path, name)) for name in (MANIFEST, ".metadata")):
            return path
    raise LoadError(
        f"{directory} holds no complete checkpoint: there is no {MANIFEST}."
    )


def read_manifest(path: str) -> dict[str, Any]:
    """The manifest of a checkpoint, its files checked.

    Raises:
        LoadError: it is damaged, or a file is missing or of another size.
    """
    where = os.path.join(path, MANIFEST)
    try:
        with open(where, encoding="utf-8") as file:
            found = json.load(file)
        if found["format"] != _FORMAT:
            raise LoadError(f"{where} has format {found['format']!r}, and this version of dtorch reads {_FORMAT}.")
        sizes, _ = dict(found["files"]), found["state"]
    except (ValueError, KeyError, TypeError) as e:
        raise LoadError(f"{where} is no manifest of a checkpoint: {e!r}.") from e
    except OSError as e:
        raise LoadError(f"{where} cannot be read: {e.strerror or e}.") from e
    for name, size in sizes.items():
        part = os.path.join(path, name)
        there = os.stat(part).st_size if os.path.isfile(part) else None
        if there != size:
            raise LoadError(f"{part} is damaged: it has {there} bytes instead of {size}." if there is not None else
                            f"{part} is missing, which {where} names.")  # fmt: skip
    return found  # type: ignore[no-any-return]


def refuse_strangers(target: str) -> None:
    """Refuse to replace a directory with files that are no checkpoint's.

    Raises:
        SaveError: there are any.
    """
    if not os.path.exists(target):
        return
    if not os.path.isdir(target):
        raise SaveError(f"{target} is a file; a checkpoint is a directory.")
    there = {str(p.relative_to(target)) for p in Path(target).rglob("*") if not p.is_dir()}
    known = {MANIFEST}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # then it is none of ours
        known.update(json.loads(Path(target, MANIFEST).read_text(encoding="utf-8"))["files"])
    strangers = sorted(name for name in there - known if not _OF_OTHERS.fullmatch(name))
    if strangers:
        raise SaveError(
            f"{target} holds files that belong to no checkpoint and would be lost: {', '.join(strangers[:5])}"
            f"{', ...' if len(strangers) > 5 else ''}. Save to a directory of its own, or move them."
        )


def _remove_abandoned(parent: str, name: str) -> None:
    """Remove what programs that have ended while saving left behind."""
    for path in Path(parent).glob(f".{_escape(name)}.saving-*"):
        with contextlib.suppress(OSError):  # somebody is writing it, or has just removed it
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _escape(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _beside(target: str, kind: str) -> str:
    parent, name = os.path.split(target)
    return os.path.join(parent, f".{name}.{kind}")


def _exchange(a: str, b: str) -> bool:
    """Exchange two directories at once; false when this file system cannot."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNABLE:
        return False
    raise OSError(code, os.strerror(code), a)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: str) -> None:
    for folder, _, files in os.walk(path):
        for name in files:
            _sync(os.path.join(folder, name))
        _sync(folder)
