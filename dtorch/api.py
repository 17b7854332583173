"""The public functions, checked and documented here; the work is done below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtorch.client import backend, factories, graph, random
from dtorch.client.explain import Explanation, explain
from dtorch.client.graph import Graph
from dtorch.client.notices import FallbackWarning, fallbacks, strict
from dtorch.client.tensor import DTensor, distribute_tensor
from dtorch.core.config import SessionConfig
from dtorch.core.mesh import DeviceMesh
from dtorch.launch import make_link
from dtorch.protocol.link import WorkerUp

aten = torch.ops.aten
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
) -> None:
    """Start the default session. Optional: the first use starts it with these defaults.

    Args:
        mode: ``"local"`` (child processes, the default) or ``"inline"`` (this process); DTORCH_MODE.
        workers: most worker processes; by default one per core. Further devices share them.
        device_type: physical devices, ``"cpu"`` or ``"cuda"``.
        max_devices: number of devices that meshes may name.
        threads: computing threads of each worker; by default cores divided by workers.
        strict: hidden redistributions are errors.
        null_workers: for measuring: this many workers that do nothing.

    Raises:
        DtorchError: already running with other options, or an impossible option.
    """
    graph.init(
        mode=mode, workers=workers, device_type=device_type, max_devices=max_devices, threads=threads, strict=strict,
        null_workers=null_workers,
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


def _factory(func: Any, ndim: Callable[[tuple[Any, ...]], int], name: str, doc: str) -> Callable[..., DTensor]:
    def make(
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        call, positional = func(*args, **kwargs)
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "generator")}
        session, mesh, where = factories.placed(device_mesh, placements, device, ndim(positional))
        out = factories.create(session, call, positional, rest, mesh, where)
        return out.requires_grad_(requires_grad)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = doc + _PLACE_DOC
    return make


_PLACE_DOC = """

    Keyword arguments beyond torch's: ``device_mesh`` (by default the default mesh) and ``placements`` (one per mesh
    axis, by default replicated). ``device=`` and ``device_mesh=`` together raise ``PlacementError``.
    """


def _size(size: tuple[Any, ...]) -> list[int]:
    return list(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple, torch.Size)) else list(size)


def _sized(op: Any) -> Any:
    return lambda *size, **kw: (op, (_size(size) if size else _size((kw["size"],)),))


def _full(size: Any, fill_value: Any, **kw: Any) -> Any:
    return aten.full.default, (_size((size,)), fill_value)


def _randint(*args: Any, **kw: Any) -> Any:
    low, high, size = args if len(args) == 3 else (0, *args)
    return aten.randint.low, (low, high, _size((size,)))


def _arange(*args: Any, **kw: Any) -> Any:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1) if len(args) == 2 else args
    return aten.arange.start_step, (start, end, step)


def _linspace(start: float, end: float, steps: int, **kw: Any) -> Any:
    return aten.linspace.default, (start, end, steps)


def _eye(n: int, m: int | None = None, **kw: Any) -> Any:
    return aten.eye.m, (n, n if m is None else m)


def _first(positional: tuple[Any, ...]) -> int:
    return len(positional[0])


def _vector(positional: tuple[Any, ...]) -> int:
    return 1


zeros = _factory(_sized(aten.zeros.default), _first, "zeros", "Zeros of the given size.")
ones = _factory(_sized(aten.ones.default), _first, "ones", "Ones of the given size.")
empty = _factory(_sized(aten.empty.memory_format), _first, "empty", "Uninitialised, of the given size.")
rand = _factory(
    _sized(aten.rand.default), _first, "rand", "Uniform random numbers in [0, 1); the same for every placement."
)
randn = _factory(_sized(aten.randn.default), _first, "randn", "Normal random numbers; the same for every placement.")
full = _factory(_full, _first, "full", "A constant of the given size.")
randint = _factory(
    _randint, lambda p: len(p[2]), "randint", "Random integers in [low, high): randint([low,] high, size)."
)
arange = _factory(_arange, _vector, "arange", "Numbers from start to end: arange([start,] end[, step]).")
linspace = _factory(_linspace, _vector, "linspace", "``steps`` numbers from start to end inclusive.")
eye = _factory(_eye, lambda p: 2, "eye", "The identity matrix of n rows and m columns.")


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
    plain = torch.tensor(data, dtype=dtype)
    factories.placed(device_mesh, placements, device, plain.dim())
    return distribute_tensor(plain, device_mesh, placements, requires_grad=requires_grad)


def _like(op: Any, name: str) -> Callable[..., DTensor]:
    def make(
        other: torch.Tensor,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        base = other
        if device is not None and device_mesh is not None:
            factories.placed(device_mesh, placements, device, other.dim())
        if device_mesh is not None or placements is not None or not isinstance(other, DTensor):
            mesh = device_mesh if device_mesh is not None or not isinstance(other, DTensor) else other.device_mesh
            session, layout, where = factories.placed(mesh, placements, None, other.dim())
            dtype = kwargs.pop("dtype", None) or other.dtype
            base = factories.create(
                session, aten.empty.memory_format, (list(other.shape),), {"dtype": dtype}, layout, where
            )
        with torch.no_grad():
            out = op(base.detach(), *args, **kwargs)
        return out.requires_grad_(requires_grad)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"torch.{name} of a tensor, placed like it or by ``device_mesh`` and ``placements``."
    return make


zeros_like = _like(torch.zeros_like, "zeros_like")
ones_like = _like(torch.ones_like, "ones_like")
empty_like = _like(torch.empty_like, "empty_like")
full_like = _like(torch.full_like, "full_like")
rand_like = _like(torch.rand_like, "rand_like")
randn_like = _like(torch.randn_like, "randn_like")
randint_like = _like(torch.randint_like, "randint_like")

Generator = random.Generator

__all__ = [
    "DTensor", "Explanation", "FallbackWarning", "Generator", "Graph", "SessionConfig", "Tensor", "arange", "distribute_tensor", "empty",
    "empty_like", "explain", "eye", "fallbacks", "full", "full_like", "init", "linspace", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "shutdown", "strict", "synchronize", "tensor", "workers", "zeros",
    "zeros_like",
]  # fmt: skip
