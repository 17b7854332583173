"""The public functions, checked and documented here; the work is done below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.client import backend, factories, graph, random
from dtorch.client.capture import CaptureWarning, capture
from dtorch.client.checkpoint import PendingSave, RandomState, load, save
from dtorch.client.explain import Explanation, explain, plan_stats
from dtorch.client.graph import Graph
from dtorch.client.notices import FallbackWarning, fallbacks, strict
from dtorch.client.tensor import DTensor, distribute_tensor
from dtorch.core.config import SessionConfig
from dtorch.core.mesh import DeviceMesh
from dtorch.launch import make_link
from dtorch.protocol.link import WorkerUp

Tensor = DTensor

backend.register()
graph.make_link = make_link


def init(
    mode: str | None = None,
    *,
    workers: int | None = None,
    device_type: str | None = None,
    max_devices: int | None = None,
    threads: int | None = None,
    strict: bool | None = None,
    null_workers: int | None = None,
    file_roots: Sequence[str] | None = None,
    restarts: int | None = None,
    log_operators: int | None = None,
    log_bytes: int | None = None,
    memory_limit: int | None = None,
) -> None:
    """Start the default session. Optional: the first use starts it with these defaults.

    Args:
        mode: ``"local"`` (child processes, the default), ``"inline"`` (this process) or ``"cluster"`` (see ``connect``);
            DTORCH_MODE.
        workers: most worker processes; by default one per core. Further devices share them.
        device_type: physical devices, ``"cpu"`` or ``"cuda"``.
        max_devices: number of devices that meshes may name.
        threads: computing threads of each worker; by default cores divided by workers, at most torch's in this process.
        strict: hidden redistributions are errors.
        null_workers: for measuring: this many workers that do nothing.
        file_roots: directories below which workers may read and write files; by default wherever you may;
            DTORCH_FILE_ROOTS.
        restarts: how often in a row lost workers are started again, and brought to where they were (3); 0: never.
        memory_limit: bytes that tensors may occupy on each device; an operator that needs more raises an error of torch's
            ``OutOfMemoryError``, and those after it work. By default as much as there is.
        log_operators, log_bytes: what is kept to repeat then, at most, before workers write snapshots.

    Raises:
        DtorchError: already running with other options, or an impossible option.
    """
    graph.init(
        mode=mode, workers=workers, device_type=device_type, max_devices=max_devices, threads=threads, strict=strict,
        null_workers=null_workers, file_roots=file_roots, restarts=restarts, log_operators=log_operators,
        log_bytes=log_bytes, memory_limit=memory_limit,
    )  # fmt: skip


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    keys: str | None = None,
    workers: int | None = None,
    device_type: str | None = None,
    strict: bool | None = None,
    restarts: int | None = None,
) -> None:
    """Start the default session on a pool of other machines (docs/cluster.md).

    Args:
        address: of the pool's controller, ``tcp://host:port``; DTORCH_ADDRESS.
        token: from ``dtorch token``; DTORCH_TOKEN.
        keys: directory with ``server.pub`` and ``client.key``, from ``dtorch keys``; DTORCH_KEYS.
        workers, device_type, strict, restarts: see ``init``.

    Raises:
        DtorchError: something is not given, or a session with other options is running.
        CommError: the pool is not there, or does not let this client in; the text says why.
    """
    graph.init(
        mode="cluster", address=address, token=token, keys=keys, workers=workers, device_type=device_type, strict=strict,
        restarts=restarts,
    )  # fmt: skip


def shutdown() -> None:
    """End all sessions of this program; nothing is left running. The next use starts afresh."""
    graph.shutdown()


def workers() -> list[WorkerUp]:
    """The workers of the current session, with ``.pid .host .devices .state``."""
    session = graph.current_session()
    session.synchronize()
    return [session.workers[i] for i in sorted(session.workers)]


def synchronize() -> None:
    """Wait for everything issued so far in the current session; raises what failed on the way."""
    graph.current_session().synchronize()


def patch(*names: str) -> None:
    """Let Hugging Face libraries choose the mesh where they choose a device: ``device_map="auto"`` and ``"balanced"``,
    ``Accelerator()``, ``Trainer``, ``pipeline(device=0)``; and safetensors load to it. Imports the libraries.

    Args:
        names: of single patches; by default those of every installed library. See ``dtorch.patches``, which also takes
            them back.

    Raises:
        PatchError: an unknown name, or a named patch that does not fit the installed version of its library.
    """
    from dtorch import patches

    patches.apply(*names)


_PLACE_DOC = """

    Keyword arguments beyond torch's: ``device_mesh`` (by default the default mesh) and ``placements`` (one per mesh
    axis, by default replicated). ``device=`` and ``device_mesh=`` together raise ``PlacementError``; a ``device=``
    that is none of dtorch's gives a plain tensor.
    """


def _factory(func: Callable[..., Any], doc: str) -> Callable[..., DTensor]:
    def make(
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Any:
        return factories.make(func, args, kwargs, device_mesh, placements, device)

    make.__name__ = make.__qualname__ = func.__name__
    make.__doc__ = doc + _PLACE_DOC
    return make


zeros = _factory(torch.zeros, "Zeros of the given size.")
ones = _factory(torch.ones, "Ones of the given size.")
empty = _factory(torch.empty, "Uninitialised, of the given size.")
rand = _factory(torch.rand, "Uniform random numbers in [0, 1); the same for every placement.")
randn = _factory(torch.randn, "Normal random numbers; the same for every placement.")
full = _factory(torch.full, "A constant of the given size.")
randint = _factory(torch.randint, "Random integers in [low, high): randint([low,] high, size).")
arange = _factory(torch.arange, "Numbers from start to end: arange([start,] end[, step]).")
linspace = _factory(torch.linspace, "``steps`` numbers from start to end inclusive.")
logspace = _factory(torch.logspace, "``steps`` numbers from base^start to base^end, their exponents evenly spaced.")
eye = _factory(torch.eye, "The identity matrix of n rows and m columns.")
randperm = _factory(torch.randperm, "The integers from 0 to n - 1 in a random order.")
tril_indices = _factory(torch.tril_indices, "Rows and columns of the lower triangle of a matrix, (2, count).")
triu_indices = _factory(torch.triu_indices, "Rows and columns of the upper triangle of a matrix, (2, count).")


def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Any] | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A distributed tensor from Python data, as ``torch.tensor``, placed by ``device_mesh`` and ``placements``."""
    if factories.is_plain(device_mesh, placements, device):
        return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)  # type: ignore[return-value]
    session, layout = factories.locate(device_mesh, device)
    mesh = session.mesh(layout.id)
    return distribute_tensor(torch.tensor(data, dtype=dtype, device="cpu"), mesh, placements, requires_grad=requires_grad)


def _like(func: Callable[..., Any]) -> Callable[..., DTensor]:
    def make(
        other: torch.Tensor,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Any:
        return factories.make_like(func, other, args, kwargs, device_mesh, placements, device)

    make.__name__ = make.__qualname__ = func.__name__
    make.__doc__ = f"torch.{func.__name__} of a tensor, placed like it or by ``device_mesh`` and ``placements``."
    return make


zeros_like = _like(torch.zeros_like)
ones_like = _like(torch.ones_like)
empty_like = _like(torch.empty_like)
full_like = _like(torch.full_like)
rand_like = _like(torch.rand_like)
randn_like = _like(torch.randn_like)
randint_like = _like(torch.randint_like)

Generator = random.Generator

__all__ = [
    "CaptureWarning", "DTensor", "Explanation", "FallbackWarning", "Generator", "Graph", "PendingSave", "RandomState",
    "SessionConfig", "Tensor", "arange", "capture", "connect", "distribute_tensor", "empty", "empty_like", "explain",
    "eye", "fallbacks", "full", "full_like", "init", "linspace", "load", "logspace", "ones", "ones_like", "patch",
    "plan_stats", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "save", "shutdown",
    "strict", "synchronize", "tensor", "tril_indices", "triu_indices", "workers", "zeros", "zeros_like",
]  # fmt: skip
