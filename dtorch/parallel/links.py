"""How fast devices compute and talk to each other: measured by ``dtorch bench-links``, kept in a file, or assumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dtorch.client import graph
from dtorch.client.factories import make
from dtorch.client.tensor import DTensor
from dtorch.core.errors import DtorchError
from dtorch.core.mesh import DeviceMesh, init_device_mesh
from dtorch.core.placements import Partial, Placement, Replicate, Shard

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "move")
_SMALL, _LARGE = 1 << 10, 1 << 21  # elements of float32
_REPEATS = 7


@dataclass(frozen=True)
class Link:
    """A kind of communication: a fixed time for each, and bytes that a device sends each second."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """What a cost model knows of a cluster.

    Attributes:
        flops_per_s: of one device, in matrix products.
        memory_bytes_per_s: of one device, read and written by operators on single elements.
        operator_s: what an operator takes however small it is.
        issue_s: what an operator takes the client, which issues all of them: no call is shorter than that.
        kinds: communication by kind of step.
        measured: where the figures come from.
    """

    flops_per_s: float = 5e10
    memory_bytes_per_s: float = 5e9
    operator_s: float = 2e-5
    issue_s: float = 4e-5
    kinds: dict[str, Link] = field(default_factory=lambda: dict.fromkeys(KINDS, Link(3e-4, 6e8)))
    measured: str = "assumed: two CPU cores; measure with `dtorch bench-links`"

    def seconds(self, kind: str, nbytes: float) -> float:
        """Time of one step of this kind in which every device sends so many bytes."""
        link = self.kinds.get(kind)
        return 0.0 if link is None or not nbytes else link.latency_s + nbytes / link.bytes_per_s

    def save(self, path: Path) -> None:
        """Write them as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> Links:
        """What ``save`` wrote; the assumed figures when there is no such file.

        Raises:
            DtorchError: the file holds something else.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return replace(Links(**data), kinds={k: Link(**v) for k, v in data["kinds"].items()})
        except FileNotFoundError:
            return Links()
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise DtorchError(f"{path} is no result of dtorch bench-links ({e}). Run that again, or remove the file.") from e


def links_file() -> Path:
    """Where ``dtorch bench-links`` keeps what it measured: below the user's cache folder."""
    from dtorch.native.build import cache_folder

    return cache_folder().parent / "links.json"


def measure(devices: int) -> Links:
    """Measure the workers of the current session; takes seconds.

    Raises:
        DtorchError: fewer than two devices.
    """
    if devices < 2:
        raise DtorchError(f"{devices} device has no links to measure; use at least 2.")
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("dp",))
    half = DeviceMesh("cpu", list(range(devices // 2)), mesh_dim_names=("dp",))
    other = DeviceMesh("cpu", list(range(devices // 2, 2 * (devices // 2))), mesh_dim_names=("dp",))
    every, rows, columns, terms = [Replicate()], [Shard(0)], [Shard(1)], [Partial("sum")]
    steps: dict[str, tuple[DeviceMesh, Sequence[Placement], DeviceMesh, Sequence[Placement], Callable[[int], float]]] = {
        "all_reduce": (mesh, terms, mesh, every, lambda n: 2 * n * (devices - 1) / devices),
        "all_gather": (mesh, rows, mesh, every, lambda n: n * (devices - 1) / devices),
        "reduce_scatter": (mesh, terms, mesh, rows, lambda n: n * (devices - 1) / devices),
        "all_to_all": (mesh, rows, mesh, columns, lambda n: n * (devices - 1) / devices**2),
        "move": (half, rows, other, rows, lambda n: n / (devices // 2)),
    }
    kinds = {}
    for kind, (here, src, there, dst, sent) in steps.items():
        times = []
        for elements in (_SMALL, _LARGE):
            side = 1 << (elements.bit_length() // 2)
            x = _filled((elements // side, side), here, src)
            times.append((sent(elements * 4), _seconds(_redistribution(x, there, dst))))
        (few, short), (many, long) = times
        rate = max(many - few, 1.0) / max(long - short, 1e-9)
        kinds[kind] = Link(max(short - few / rate, 1e-7), rate)
    n = 512
    a, b = (_filled((n, n), mesh, every) for _ in range(2))
    wide = _filled((1 << 22,), mesh, every)
    tiny = _filled((8,), mesh, every)
    product, copy, least = _seconds(lambda: a @ b), _seconds(lambda: wide + 1), _seconds(lambda: tiny + 1)
    issue = _issue_seconds(lambda: tiny + 1)
    return Links(2 * n**3 / product, 2 * wide.nbytes / copy, least, issue, kinds, f"measured on {devices} devices")


def _issue_seconds(work: Callable[[], Any]) -> float:
    """Median processor time that this process needs for one call among many."""
    session, times = graph.current_session(), []
    repeats = 200
    for _ in range(_REPEATS):
        session.synchronize()
        start = time.thread_time()
        for _ in range(repeats):
            work()
        times.append((time.thread_time() - start) / repeats)
    return sorted(times)[_REPEATS // 2]


def _filled(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    whole = make(torch.ones, shape, {}, mesh, [p if not p.is_partial() else Replicate() for p in placements], None)
    return whole.redistribute(placements=placements)


def _redistribution(x: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Callable[[], Any]:
    return lambda: x.redistribute(mesh, placements)


def _seconds(work: Callable[[], Any]) -> float:
    """Median time of one call among several, issued together so that the way to the workers does not count."""
    session, times = graph.current_session(), []
    repeats = 4
    for _ in range(_REPEATS):
        session.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        session.synchronize()
        times.append((time.perf_counter() - start) / repeats)
    return sorted(times)[_REPEATS // 2]
