"""Runs a function on distributed tensors under many placements and compares with plain torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

import dtorch

MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (4,), (2, 2))


def spread(value: torch.Tensor, mesh: dtorch.DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """A distributed tensor; on Partial axes the devices hold terms that differ, whole numbers that cancel."""
    partial = [axis for axis, p in enumerate(placements) if p.is_partial()]
    held = [dtorch.Replicate() if p.is_partial() else p for p in placements]
    out = dtorch.Tensor(value, device_mesh=mesh, placements=held)
    if not partial:
        return cast(torch.Tensor, out)
    sizes = [mesh.shape[axis] for axis in partial]
    count = torch.Size(sizes).numel()
    terms = (torch.arange(count) - (count - 1) / 2).reshape(sizes)
    shards = [dtorch.Shard(partial.index(a)) if a in partial else dtorch.Replicate() for a in range(mesh.ndim)]
    noise = dtorch.Tensor(terms, device_mesh=mesh, placements=shards).sum().to(value.dtype).expand(value.shape)
    whole = out.redistribute(placements=list(placements))
    result = whole + noise
    assert list(result.placements) == list(placements), f"{result.placements} for {placements}"
    return cast(torch.Tensor, result)


def options(value: torch.Tensor, partial: bool) -> list[Any]:
    """The placements to try on one mesh axis."""
    found: list[Any] = [dtorch.Replicate(), *(dtorch.Shard(d) for d in range(value.ndim))]
    # In two segments, the second the other way round: no device has one box.
    found += [dtorch.Shard(d, (n // 2, n // 2 - n)) for d, n in enumerate(value.shape) if n > 1]
    if partial and value.is_floating_point():
        found.append(dtorch.Partial())
    return found


def choices(
    values: Sequence[torch.Tensor], mesh: tuple[int, ...], partial: bool, most: int, every: bool
) -> Iterator[list[list[Any]]]:
    """Placements of all tensors: every one alone (the others replicated), or some of those, and some of the rest."""
    per_tensor = [list(itertools.product(*[options(v, partial)] * len(mesh))) for v in values]
    whole = [[dtorch.Replicate()] * len(mesh) for _ in values]
    chosen = [[*whole[:i], list(p), *whole[i + 1 :]] for i, row in enumerate(per_tensor) for p in row]
    if not every and len(chosen) > most:
        chosen = random.Random(0).sample(chosen, most)
    yield from chosen
    if len(values) > 1:
        rest = random.Random(1)
        for _ in range(most):
            yield [list(rest.choice(row)) for row in per_tensor]


def sweep(
    run: Callable[..., Any], *values: torch.Tensor, exact: bool = True, partial: bool = True, most: int = 8,
    meshes: Sequence[tuple[int, ...]] = MESHES, thorough: Sequence[tuple[int, ...]] = ((2,), (3,), (4,)),
) -> None:  # fmt: skip
    """Compare ``run(*values)`` with ``run`` of distributed tensors, for shapes, dtypes, strides and values.

    Args:
        exact: values must be equal to the last bit (with Partial inputs they may differ by rounding).
        partial: try Partial inputs too.
        most: at most so many combinations of several placements on each mesh.
        thorough: meshes on which every placement of every single tensor is tried, not just ``most`` of them.
    """
    want = [x for x in tree_leaves(run(*[v.clone() for v in values])) if x is not None]
    fallbacks = dict(dtorch.fallbacks())
    for shape in meshes:
        mesh = dtorch.DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape).tolist())
        for placements in choices(values, shape, partial, most, shape in thorough):
            given = [spread(v.clone(), mesh, p) for v, p in zip(values, placements, strict=True)]
            got = [x for x in tree_leaves(run(*given)) if x is not None]
            rounded = not exact or any(p.is_partial() for row in placements for p in row)
            compare(got, want, rounded, f"mesh {shape}, {placements}")
    assert dict(dtorch.fallbacks()) == fallbacks, "an operator fell back"


def compare(got: Sequence[Any], want: Sequence[Any], rounded: bool, what: str) -> None:
    """Check results against torch's."""
    assert len(got) == len(want), what
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, torch.Tensor):
            assert g == w, what
            continue
        assert g.shape == w.shape, f"{what}: shape {tuple(g.shape)} for {tuple(w.shape)}"
        assert g.dtype == w.dtype, f"{what}: {g.dtype} for {w.dtype}"
        value, right = g.to_torch(), w.resolve_conj().resolve_neg()
        if rounded and (right.is_floating_point() or right.is_complex()):
            fault = f"{what}\n{value}\n{right}"
            torch.testing.assert_close(value, right, rtol=2e-4, atol=2e-4, equal_nan=True, msg=fault)
        else:
            same = torch.equal(value.nan_to_num(0.5), right.nan_to_num(0.5))
            assert same, f"{what}: values differ\n{value}\n{right}"


def value_of(x: torch.Tensor) -> torch.Tensor:
    """The value of a distributed tensor as a plain one."""
    return cast(torch.Tensor, cast(Any, x).to_torch())


def placements_of(x: torch.Tensor) -> list[Any]:
    """Placements of a result, as a list."""
    return list(x.placements)  # type: ignore[attr-defined]
