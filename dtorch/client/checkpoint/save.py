"""``dtorch.save``: a state into a directory, while the program goes on."""

from __future__ import annotations

import copy
import os
import threading
from collections import defaultdict
from typing import Any

import torch

from dtorch.client.checkpoint import dcp
from dtorch.client.checkpoint.directory import Staging
from dtorch.client.checkpoint.layout import Writers, lay_out
from dtorch.client.checkpoint.pending import PendingSave, begin, previous
from dtorch.client.checkpoint.tree import Encoder, Weights
from dtorch.client.request import Request
from dtorch.client.session import Session
from dtorch.client.tensor import DTensor
from dtorch.core.config import check_roots
from dtorch.core.errors import DtorchError, SaveError
from dtorch.core.memory import raw, write_all
from dtorch.core.spec import TensorSpec
from dtorch.protocol import commands as C

_FILES_OF_TORCH = (".pt", ".pth", ".bin")
_LOOK_S = 0.02  # between looks for what workers say


def save(
    state: Any, directory: str | os.PathLike[str], *, blocking: bool = False, format: str = "safetensors"
) -> PendingSave:
    """Write a checkpoint, while the program goes on: the values are those of now, whatever is written to them later.

    The directory becomes a checkpoint, or a new one, at one moment, when all of it is on the disk. The workers write,
    each its own part, into files that any program can read: weights of modules as ``model.safetensors``, with the
    module's configuration if it has one, in a folder named by the module's key, from which ``from_pretrained`` loads; all
    other tensors as ``state.safetensors``; everything else in ``checkpoint.json``.

    Args:
        state: tensors on meshes and plain ones, numbers, text, None, generators, containers of these, and objects with
            ``state_dict`` and ``load_state_dict`` such as modules, optimizers, schedulers and ``RandomState``.
        directory: of this checkpoint alone; one that is there already is replaced. A file object, or a name as of a file of
            torch (``.pt``, ``.pth``, ``.bin``), is left to ``torch.save``.
        blocking: wait until it is complete.
        format: ``"safetensors"``, or ``"dcp"`` for files of ``torch.distributed.checkpoint``, which this process writes.

    Returns:
        What to wait for; a later save and the end of the program wait as well.

    Raises:
        SaveError: the save before could not be written, unless its ``wait`` has said so; the directory holds other files;
            or, with ``blocking``, this one could not be written.
        DtorchError: the state holds what cannot be saved, or an unknown format; nothing is written.
    """
    if hasattr(directory, "write") or os.path.splitext(directory)[1] in _FILES_OF_TORCH:
        torch.save(state, directory)
        return PendingSave(str(directory))
    if format not in ("safetensors", "dcp"):
        raise DtorchError(f"format={format!r}: a checkpoint is written as 'safetensors' or 'dcp'.")
    previous()
    with torch.no_grad():
        encoder = Encoder()
        tree = encoder.encode(state)
        prepare = _Writing if format == "safetensors" else dcp.Writing
        writing = prepare(encoder.weights, tree)
        pending = begin(os.path.abspath(directory), writing)
    if blocking:
        pending.wait()
    return pending


class _Writing:
    """One checkpoint of safetensors files.

    Args:
        weights: its tensors.
        tree: the rest.
    """

    def __init__(self, weights: list[Weights], tree: Any) -> None:
        self._weights, self._tree = [w for w in weights if w.tensors or w.module is not None], tree
        self._laid_out = [lay_out(w) for w in self._weights]
        self._staging: Staging | None = None
        self._descriptors: list[int] = []
        self._plain: list[tuple[int, torch.Tensor, int]] = []  # descriptor, tensor, offset
        self._shared: defaultdict[Session, list[tuple[str, Any, int]]] = defaultdict(list)  # file, handle, offset
        self._asked: list[tuple[Session, int, Request]] = []

    def begin(self, directory: str) -> None:
        """Make the files, and have the workers copy what they hold.

        Raises:
            OSError, DtorchError: that fails; nothing is left.
        """
        self._staging = Staging(directory)
        try:
            for weights, (files, texts) in zip(self._weights, self._laid_out, strict=True):
                if weights.module is not None:
                    _write_config(weights.module, os.path.join(self._staging.path, weights.folder))
                for file in files:
                    descriptor = self._staging.create(file.path, file.header, file.size)
                    self._descriptors.append(descriptor)
                    for name, offset in file.places:
                        self._take(weights.tensors[name], file.path, descriptor, offset)
                for path, text in texts.items():
                    self._descriptors.append(self._staging.create(path, text.encode(), len(text.encode())))
            writers = Writers()
            for session, tensors in self._shared.items():
                self._ask(session, self._staging.path, tensors, writers)
        except BaseException:
            self._end()
            raise
        self._weights.clear()

    def finish(self) -> None:
        """Write the rest, wait for the workers and put the checkpoint in its place.

        Raises:
            OSError, DtorchError: that fails; nothing is left.
        """
        assert self._staging is not None, "it has begun"
        try:
            for descriptor, t, offset in self._plain:
                write_all(descriptor, memoryview(raw(t)), offset)
            self._plain.clear()
            for session, _, request in self._asked:
                _await(session, request)
            self._staging.commit({"state": self._tree})
        finally:
            self._end()

    def _take(self, t: torch.Tensor, file: str, descriptor: int, offset: int) -> None:
        if isinstance(t, DTensor):
            self._shared[t._h.session].append((file, t._h, offset))
        elif t.numel():
            self._plain.append((descriptor, t, offset))

    def _ask(self, session: Session, path: str, tensors: list[tuple[str, Any, int]], writers: Writers) -> None:
        """Have a session's workers copy these tensors and write them."""
        if session.config.null_workers:
            raise SaveError("the workers of this session hold no values, so there is nothing to save.")
        check_roots(path, session.config.file_roots)
        number, request = session.request(session.worker_count)
        self._asked.append((session, number, request))
        with session.lock:
            session.buf.extend((C.SAVE, number, path))
            for k, (file, handle, offset) in enumerate(tensors, 1):
                spec: TensorSpec = handle.spec
                spec_id, wanted = session.spec_id(spec), writers.positions(spec)
                session.buf.extend((C.WRITE, number, file, handle.id, spec_id, offset, wanted, k == len(tensors)))
        session.emitted()
        session.flush()

    def _end(self) -> None:
        """Let go of everything; idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        while self._asked:
            session, number, _ = self._asked.pop()
            if session.closed is None:
                session.buf.extend((C.SAVE, number, None))
        if self._staging is not None:
            self._staging.abandon()


def _await(session: Session, request: Request) -> None:
    """Wait until all workers have written their parts.

    Raises:
        OSError, DtorchError: one could not, or never will.
    """
    came = threading.Event()
    request.callbacks.append(came.set)
    while not request.done and not came.wait(_LOOK_S):
        session.wait(request, 1e-3)
    if request.error is not None:
        raise request.error
    for kind, text in request.refusals:
        raise (OSError if kind.endswith("Error") and kind != "RemoteError" else DtorchError)(text)


def _write_config(module: Any, folder: str) -> None:
    """Write a module's configuration as its library does, so that ``from_pretrained`` finds it."""
    os.makedirs(folder, exist_ok=True)
    if hasattr(module, "save_config"):
        module.save_config(folder)
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if hasattr(config, "save_pretrained"):
            config = copy.deepcopy(config)
            if hasattr(config, "architectures"):
                config.architectures = [type(module).__name__]
                config.dtype = getattr(module, "dtype", None)
            config.save_pretrained(folder)
