"""One worker process of test_processes.py: ``python peer.py JOBS INDEX WORKERS DIRECTORY`` (jobs joined by commas)."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dtorch.core.errors import CommError
from dtorch.core.placements import REPLICATE, Partial, Shard
from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.planner.redistribute import plan_steps
from dtorch.worker.collectives import Collectives
from tests.redistribute.cases import (
    alone,
    basic_pairs,
    make_spec,
    mesh_of,
    random_value,
    redistribute,
    same_bits,
    sample_pairs,
    split,
    widened,
)


def say(*words: object) -> None:
    print(*words, flush=True)


def compare(
    collectives: Collectives, src: TensorSpec, dst: TensorSpec, local: Sequence[torch.Tensor], exact: bool = True
) -> None:
    """This worker's results are those of one worker that hosts all devices, in every bit or (not exact) in value."""
    me, hosts, new_hosts = collectives.index, collectives.hosts(src.mesh), collectives.hosts(dst.mesh)
    wanted = redistribute(alone(src.mesh, dst.mesh), src, dst, local)
    if me not in (*hosts, *new_hosts):
        return
    got = redistribute(collectives, src, dst, [t for t, w in zip(local, hosts, strict=True) if w == me])
    expected = [t for t, w in zip(wanted, new_hosts, strict=True) if w == me]
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        same = same_bits(a, b) if exact else torch.equal(widened(a), widened(b))
        assert same, f"{src} to {dst} over workers {hosts} and {new_hosts}: {a} instead of {b}"
        assert a.stride() == b.stride()


def cases(index: int, workers: int, directory: str, native: bool = False) -> None:
    """Every kind of step and many pairs of specs, for several ways to spread devices over the workers."""
    collectives = Collectives(index, directory, native=native)
    first, second = tuple(range(workers)), tuple(reversed(range(workers)))
    plans = [
        (mesh_of(0, (workers,)), first),
        (mesh_of(1, (workers,), [7, 4, 1][:workers]), second),
        (mesh_of(2, (2, 2)), (0, 0, 1, 1)),
        (mesh_of(3, (2, 2), [3, 2, 9, 8]), (0, 1, 1, 0)),
        (mesh_of(4, (4,)), (0, 1, 0, workers - 1)),
        (mesh_of(5, (1,)), (workers - 1,)),
    ]
    for mesh, hosts in plans:
        collectives.add_mesh(mesh, hosts)
    rng = random.Random(0)
    meshes = [mesh for mesh, _ in plans]
    found = list(sample_pairs(meshes, 150, 1, [(), (0,), (1,), (5,), (4, 6), (3, 0), (5, 3, 2), (7, 1, 3)]))
    for mesh in meshes:
        found += basic_pairs(mesh, (6, 5))
    for src, dst in found:
        value = random_value(src.shape, src.dtype, rng)
        local = split(src, value, rng)
        # The backend adds in its own order; of whole numbers the sums are the same, but for the sign of zero.
        compare(collectives, src, dst, local, exact=not native)
    say("done", collectives.groups.sent_messages > 0)
    collectives.close()


def native(index: int, workers: int, directory: str) -> None:
    """`cases` with the backend's own collectives."""
    cases(index, workers, directory, native=True)


def bits(index: int, workers: int, directory: str) -> None:
    """Reductions of real numbers, small and large, even and uneven, have the same bits however devices are spread."""
    collectives = Collectives(index, directory)
    rng = torch.Generator().manual_seed(0)
    for number, hosts in enumerate([(0, 1, 2), (2, 0, 1), (0, 0, 1, 2), (1, 0, 0, 1), (2, 2, 2, 2)]):
        mesh = mesh_of(number, (len(hosts),))
        collectives.add_mesh(mesh, hosts)
        for shape in ((5,), (301, 203)):
            for dtype in (torch.float32, torch.bfloat16):
                for wanted in (REPLICATE, Shard(0), Shard(len(shape) - 1)):
                    src, dst = (make_spec(mesh, [p], shape, dtype) for p in (Partial(), wanted))
                    local = [torch.randn(shape, generator=rng).to(dtype) for _ in hosts]
                    compare(collectives, src, dst, local)
    say("done", True)
    collectives.close()


def _pair(workers: int, size: int = 256) -> tuple[MeshLayout, TensorSpec, TensorSpec]:
    mesh = mesh_of(0, (workers,))
    return mesh, make_spec(mesh, [Partial()], (size,)), make_spec(mesh, [REPLICATE], (size,))


def lonely(index: int, workers: int, directory: str, timeout_s: float = 30.0) -> None:
    """After some reductions worker 1 does nothing more. Worker 0 says what it sees, and goes on with a replacement."""
    collectives = Collectives(index, directory, timeout_s)
    mesh, src, dst = _pair(workers)
    collectives.add_mesh(mesh, range(workers))
    (step,) = plan_steps(src, dst)
    term = torch.ones(256)
    for _ in range(3):
        collectives.run(step, [term])
    say("ready")
    if index == 1:
        sys.stdin.readline()
    for _ in range(2):
        try:
            collectives.run(step, [term])
        except CommError as e:
            say(time.monotonic(), e)
    if sys.stdin.readline():
        collectives.reset(1)
        (out,) = collectives.run(step, [term])
        say("done", out.eq(2).all().item())
    collectives.close()


def impatient(index: int, workers: int, directory: str) -> None:
    """`lonely`, but worker 0 waits one second only."""
    lonely(index, workers, directory, 1.0 if index == 0 else 30.0)


def replacement(index: int, workers: int, directory: str) -> None:
    """Takes the place of a worker that ended."""
    collectives = Collectives(index, directory)
    collectives.reset(1)
    mesh, src, dst = _pair(workers)
    collectives.add_mesh(mesh, range(workers))
    (out,) = collectives.run(plan_steps(src, dst)[0], [torch.ones(256)])
    say("done", out.eq(2).all().item())
    collectives.close()


def absent(index: int, workers: int, directory: str) -> None:
    """A worker that never comes."""
    collectives = Collectives(index, directory, 0.5)
    mesh, src, dst = _pair(workers)
    collectives.add_mesh(mesh, range(workers))
    try:
        collectives.run(plan_steps(src, dst)[0], [torch.ones(256)])
    except CommError as e:
        say(e)
    collectives.close()


def timing(index: int, workers: int, directory: str) -> None:
    """Median times of all-reduces, ours and the backend's, in turns (not a test; run by hand)."""
    both = [Collectives(index, directory, native=native) for native in (False, True)]
    for native, collectives in enumerate(both):
        collectives.reset(native)
    for size in (256, 2**18, 2**22):
        mesh, src, dst = _pair(workers, size)
        (step,), times = plan_steps(src, dst), [list[float](), list[float]()]
        for native in [0, 1] * (200 if size < 1000 else 20):
            both[native].add_mesh(mesh, range(workers))
            start = time.perf_counter()
            both[native].run(step, [torch.ones(size)])
            times[native].append(time.perf_counter() - start)
        medians = [sorted(t)[len(t) // 2] * 1e6 for t in times]
        say(f"all_reduce of {size * 4} bytes among {workers}: {medians[0]:.0f} us; the backend's {medians[1]:.0f} us")


JOBS: dict[str, Callable[[int, int, str], None]] = {
    "cases": cases,
    "native": native,
    "bits": bits,
    "lonely": lonely,
    "impatient": impatient,
    "replacement": replacement,
    "absent": absent,
    "timing": timing,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        meeting = Path(sys.argv[4], "lonely" if name == "replacement" else name)
        meeting.mkdir(exist_ok=True)
        JOBS[name](int(sys.argv[2]), int(sys.argv[3]), str(meeting))
