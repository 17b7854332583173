"""Specs, their local tensors, and what the devices must hold: the plain definition that redistributions are held to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

from dtorch.core.placements import REDUCE_OPS, REPLICATE, Partial, Placement, Shard
from dtorch.core.spec import MeshLayout, TensorSpec, dense_strides
from dtorch.planner.redistribute import plan_steps, reducible
from dtorch.worker.collectives import Collectives
from dtorch.worker.groups import flat_bytes

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32,
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def make_spec(
    mesh: MeshLayout,
    placements: Sequence[Placement],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    order: Sequence[int] | None = None,
) -> TensorSpec:
    """A spec whose dimensions lie in memory in this order, outermost first (default: row-major)."""
    order = range(len(shape)) if order is None else order
    stride = dense_strides(shape, [2] * len(shape), [2 ** (len(shape) - order.index(d)) for d in range(len(shape))])
    return TensorSpec(mesh, tuple(placements), tuple(shape), stride, dtype)


def random_value(shape: Sequence[int], dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """Small whole numbers, so that every sum and product is exact in every dtype."""
    parts = [_whole(shape, -1, 2, rng) for _ in range(2)]
    return _compose(parts, dtype)


def split(spec: TensorSpec, value: torch.Tensor, rng: random.Random) -> list[torch.Tensor]:
    """Local tensors of a value on every device; the terms of partial axes are random."""
    terms: dict[tuple[int, ...], torch.Tensor] = {(): value}
    for axis, p in enumerate(spec.placements):
        n, finer = spec.mesh.shape[axis], dict[tuple[int, ...], torch.Tensor]()
        for where, term in terms.items():
            pieces = _terms(term, p.reduce_op, n, rng) if isinstance(p, Partial) else [term] * n
            finer.update({(*where, i): piece for i, piece in enumerate(pieces)})
        terms = finer
    return [_dense(_part(terms[c], spec, i), spec) for i, c in enumerate(spec.mesh.coordinates)]


def check(spec: TensorSpec, value: torch.Tensor, local: Sequence[torch.Tensor]) -> None:
    """Every device holds its part of the value (its terms reduce to it), densely, in the memory order of the spec."""
    assert len(local) == spec.mesh.size
    for position, t in enumerate(local):
        shape = spec.local_shape(position)
        assert t.dtype == spec.dtype
        assert tuple(t.shape) == shape
        assert t.stride() == dense_strides(shape, spec.shape, spec.stride)
        assert t.storage_offset() == 0
        assert t.untyped_storage().nbytes() == t.nbytes
    known = dict(zip(spec.mesh.coordinates, map(widened, local), strict=True))
    for axis in reversed(range(spec.mesh.ndim)):
        p = spec.placements[axis]
        if isinstance(p, Partial):
            for group in spec.mesh.groups(axis):
                at = [spec.mesh.coordinates[i] for i in group]
                known.update(dict.fromkeys(at, _reduce([known[c] for c in at], p.reduce_op, spec.dtype)))
    for position, c in enumerate(spec.mesh.coordinates):
        wanted = widened(_part(value, spec, position))
        assert torch.equal(known[c], wanted), f"{spec} at {c}: {known[c]} instead of {wanted}"


def alone(*meshes: MeshLayout) -> Collectives:
    """A worker that hosts all devices."""
    collectives = Collectives(0, None)
    for mesh in meshes:
        collectives.add_mesh(mesh, [0] * mesh.size)
    return collectives


def redistribute(
    collectives: Collectives, src: TensorSpec, dst: TensorSpec, local: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """All steps of a plan on this worker's tensors."""
    for step in plan_steps(src, dst):
        local = collectives.run(step, local)
    return list(local)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and bits."""
    return a.shape == b.shape and torch.equal(flat_bytes(a), flat_bytes(b))


def placements_of(ndim: int, dtype: torch.dtype) -> list[Placement]:
    """All placements for a tensor of so many dimensions and this dtype."""
    return [
        REPLICATE,
        *(Shard(d) for d in range(ndim)),
        *(Partial(op) for op in REDUCE_OPS if reducible(op, dtype)),
    ]


def sample_pairs(
    meshes: Sequence[MeshLayout], count: int, seed: int, shapes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """Pairs of specs drawn by a fixed seed: the same in every process."""
    rng = random.Random(seed)
    for _ in range(count):
        shape, dtype = rng.choice(shapes), rng.choice(DTYPES)
        specs = []
        for mesh in (rng.choice(meshes), rng.choice(meshes)):
            placements = [segmented(rng.choice(placements_of(len(shape), dtype)), shape, rng) for _ in mesh.shape]
            order = rng.sample(range(len(shape)), len(shape))
            specs.append(make_spec(mesh, placements, shape, dtype, order))
        yield specs[0], specs[1]


def segmented(p: Placement, shape: Sequence[int], rng: random.Random) -> Placement:
    """The placement, sometimes with up to three segments."""
    if not isinstance(p, Shard) or rng.random() < 0.6:
        return p
    ends = sorted(rng.randint(0, shape[p.dim]) for _ in range(2))
    lengths = (ends[0], ends[1] - ends[0], shape[p.dim] - ends[1])
    return Shard(p.dim, tuple(rng.choice((n, -n)) for n in lengths))


def basic_pairs(mesh: MeshLayout, shape: tuple[int, ...]) -> list[tuple[TensorSpec, TensorSpec]]:
    """Every kind of step once, along the last axis of the mesh, and nested shards that need a move."""
    sharded, other, replicated, partial = Shard(0), Shard(1), REPLICATE, Partial()
    ends = [
        (sharded, replicated), (sharded, other), (replicated, sharded), (replicated, partial), (sharded, partial),
        (partial, replicated), (partial, other), (Partial("max"), replicated), (Partial("avg"), sharded),
        (Partial("product"), Partial("min")),
    ]  # fmt: skip
    rest = (REPLICATE,) * (mesh.ndim - 1)
    ends.append((sharded, Shard(0, (shape[0] // 2, shape[0] // 2 - shape[0]))))
    found = [(make_spec(mesh, (*rest, a), shape), make_spec(mesh, (*rest, b), shape)) for a, b in ends]
    if mesh.ndim == 2:
        nested = make_spec(mesh, (sharded, sharded), shape)
        found += [(nested, make_spec(mesh, (p, sharded), shape)) for p in (replicated, other)]
    return found


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _whole(shape: Sequence[int], low: int, high: int, rng: random.Random) -> torch.Tensor:
    numbers = [rng.randint(low, high) for _ in range(_numel(shape))]
    return torch.tensor(numbers, dtype=torch.int64).view(torch.Size(shape))


def _part(value: torch.Tensor, spec: TensorSpec, position: int) -> torch.Tensor:
    """What a device holds, index by index."""
    indices = [list(range(n)) for n in spec.shape]
    for p, parts, index in zip(spec.placements, spec.mesh.shape, spec.mesh.coordinates[position], strict=True):
        if isinstance(p, Shard):
            held, start = [], 0
            for n in p.segments or (spec.shape[p.dim],):
                mine = [i for i in indices[p.dim] if start <= i < start + abs(n)]
                step = -(-len(mine) // parts)
                place = index if n >= 0 else parts - 1 - index
                held += mine[place * step : (place + 1) * step]
                start += abs(n)
            indices[p.dim] = held
    for d, held in enumerate(indices):
        value = torch.cat([value.narrow(d, i, 1) for i in held] or [value.narrow(d, 0, 0)], d)
    return value


def _dense(t: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    out = torch.empty_strided(t.shape, dense_strides(t.shape, spec.shape, spec.stride), dtype=t.dtype)
    return out.copy_(t)


def widened(t: torch.Tensor) -> torch.Tensor:
    """In a dtype with exact arithmetic: complex128, float64, or int64."""
    if t.dtype.is_complex:
        return t.to(torch.complex128)
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def _compose(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers as this dtype (negative ones wrap around if it has no sign), the second as imaginary part."""
    if dtype == torch.bool:
        return parts[0] > 0
    if dtype.is_complex:
        return torch.complex(*(p.double() for p in parts)).to(dtype)
    return parts[0].abs().to(dtype) if dtype.is_signed is False else parts[0].to(dtype)


def _terms(value: torch.Tensor, reduce_op: str, n: int, rng: random.Random) -> list[torch.Tensor]:
    """Random terms of the dtype that reduce to the value, all small."""
    v, dtype, chosen = widened(value), value.dtype, rng.randrange(n)

    def noise(low: int, high: int) -> torch.Tensor:
        return _whole(v.shape, low, high, rng).to(v.dtype)

    others = n - 1
    if dtype == torch.bool:
        noisy = {"max": v * noise(0, 1), "sum": v * noise(0, 1), "min": v | noise(0, 1), "product": v | noise(0, 1)}
        terms = [noisy.get(reduce_op, v)] * others
        last = v
    elif reduce_op == "product":
        sign = noise(0, 1) * 2 - 1 if dtype.is_signed else noise(1, 1)
        terms, last = [sign] * others, v * sign if others % 2 else v
    elif reduce_op in ("max", "min"):
        gap = noise(0, 3) if dtype.is_signed or reduce_op == "min" else v * noise(0, 1)
        terms, last = [v - gap if reduce_op == "max" else v + gap] * others, v
    else:
        roomy = dtype.itemsize > 1 and dtype.is_signed
        terms = [noise(0, 1) if roomy else noise(0, 0) for _ in range(others)]
        if reduce_op == "avg" and not roomy:
            terms = [v] * others
        last = v * (n if reduce_op == "avg" else 1) - sum(terms, torch.zeros_like(v))
    terms.insert(chosen, last)
    return [t.to(dtype) for t in terms]


def _reduce(terms: Sequence[torch.Tensor], reduce_op: str, dtype: torch.dtype) -> torch.Tensor:
    stack = torch.stack(list(terms))
    if dtype == torch.bool:
        return stack.amax(0) if reduce_op in ("sum", "max") else stack.amin(0)
    if reduce_op in ("max", "min"):
        return stack.amax(0) if reduce_op == "max" else stack.amin(0)
    if reduce_op == "product":
        return stack.prod(0)
    total = stack.sum(0)
    if reduce_op == "avg":
        total = total / len(terms) if dtype.is_floating_point or dtype.is_complex else total // len(terms)
    return widened(total.to(dtype))


def mesh_of(number: int, shape: tuple[int, ...], devices: Sequence[int] | None = None) -> MeshLayout:
    """A mesh of this number and shape, on the first devices unless they are named."""
    size = _numel(shape)
    return MeshLayout(number, shape, tuple(range(size) if devices is None else devices))


def shapes_up_to(devices: int) -> list[tuple[int, ...]]:
    """Mesh shapes of one to three axes with at most so many devices."""
    sizes = range(1, devices + 1)
    return [s for n in (1, 2, 3) for s in itertools.product(sizes, repeat=n) if _numel(s) <= devices]
