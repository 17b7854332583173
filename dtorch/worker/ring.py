"""Ring attention: every device keeps its rows of the query while blocks of keys and values go round.

What a block gives is combined by the logarithm of each row's sum, so no device ever holds more than two blocks, and of
large ones just some heads at a time: they go round one part of the heads after the other.
(Liu et al., Ring Attention with Blockwise Transformers, 2023; the combination is that of FlashAttention.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from dtorch.core.pieces import indices
from dtorch.core.placements import Shard
from dtorch.core.spec import MeshLayout, Span, TensorSpec, dense_strides
from dtorch.core.steps import Step
from dtorch.protocol.plans import WirePlan
from dtorch.worker.kernels import Context

aten = torch.ops.aten
Exchange = Callable[[Step, list[torch.Tensor]], list[torch.Tensor]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Rounds = tuple[tuple[tuple[int, Step], ...], ...]

_HEADS = 1
"""Dimension of heads, in (samples, heads, rows, features) and in the (samples, heads, rows) of sums."""

_PART_BYTES = 1 << 17
"""A send of less costs its latency more than its bytes, so that no part of a block is smaller."""

_PARTS = (4, 5, 6, 7, 8, 3, 2)
"""Numbers of parts, the best first: on four devices, three quarters of a part in flight are a tenth of what one holds."""


class Ring:
    """The devices of this worker on a ring.

    Args:
        plan: with the sends in ``rounds``.
        contexts: one a local device.
        positions: local positions by mesh id.
        exchange: runs one step.
        hold: told of tensors that are made on the way, for those who count memory.
    """

    def __init__(
        self,
        plan: WirePlan,
        contexts: Sequence[Context],
        positions: dict[int, list[int]],
        exchange: Exchange,
        hold: Callable[[list[torch.Tensor]], None],
    ) -> None:
        self.plan, self.contexts, self._positions, self._exchange = plan, contexts, positions, exchange
        self.slots = [slot for slot, _ in plan.rounds[0]]
        self.hold = hold
        self._mesh = plan.rounds[0][0][1].src.mesh

    def parts(
        self, arguments: Sequence[Arguments], made: Sequence[Sequence[torch.Tensor]]
    ) -> Iterator[tuple[Ring, list[Arguments], list[list[torch.Tensor]]]]:
        """The ring for one part of the heads after the other, with its views of arguments and of results."""
        count = number_of_parts(self.plan.rounds, self.contexts[0].inputs)
        if count == 1:
            yield self, list(arguments), [list(tensors) for tensors in made]
            return
        of_heads = {self.contexts[0].index("query"), *self.slots}
        contexts = [
            replace(
                ctx,
                inputs=tuple(_fewer(s, count) if i in of_heads else s for i, s in enumerate(ctx.inputs)),
                outputs=tuple(_fewer(s, count) for s in ctx.outputs),
            )
            for ctx in self.contexts
        ]
        plan = replace(self.plan, rounds=rounds_of(self.plan.rounds, count))
        ring = Ring(plan, contexts, self._positions, self._exchange, self.hold)
        for i in range(count):
            some = [_some_heads(ctx, *given, i, count) for ctx, given in zip(contexts, arguments, strict=True)]
            yield ring, some, [[_narrow(t, _HEADS, i, count) for t in tensors] for tensors in made]

    def layouts(self) -> Iterator[MeshLayout]:
        """Where blocks stand in each round."""
        yield self._mesh
        count = self._count()
        for row in self.plan.rounds[: count - 1]:
            yield row[0][1].dst.mesh

    def _count(self) -> int:
        """Number of blocks: as many as rounds when the last brings them home, else one more."""
        home = self.plan.rounds[-1][0][1].dst.mesh is self._mesh
        return len(self.plan.rounds) if home else len(self.plan.rounds) + 1

    def columns(self, layout: MeshLayout, k: int) -> tuple[Span, ...]:
        """Which columns the block has that local device ``k`` holds in a round."""
        device = self._mesh.devices[self.contexts[k].position]
        spec = self.contexts[k].inputs[self.slots[0]]
        return spec.spans(layout.devices.index(device))[-2]

    def send(self, r: int, which: int, local: list[torch.Tensor]) -> list[torch.Tensor]:
        """Round ``r``'s send of tensors like slot ``slots[which]``; one a local device, in their order."""
        step = self.plan.rounds[r][which][1]
        moved = self._exchange(step, self._order(local, self._mesh, step.src.mesh))
        return self._order(moved, step.dst.mesh, self._mesh)

    def _order(self, local: list[torch.Tensor], have: MeshLayout, want: MeshLayout) -> list[torch.Tensor]:
        devices = [have.devices[p] for p in self._positions[have.id]]
        return [local[devices.index(want.devices[p])] for p in self._positions[want.id]]


def number_of_parts(rounds: Rounds, wanted: Sequence[TensorSpec]) -> int:
    """In how many parts of the heads the blocks go round: the same on every worker.

    Args:
        rounds: the sends of keys and values, or of anything else.
        wanted: specs of the slots as the operator gets them.
    """
    if len(rounds[0]) < 2:
        return 1
    slot, key = rounds[0][0][0], rounds[0][0][1].src
    query = wanted[slot - 1]
    plain = all(p == Shard(_HEADS) or not p.is_shard(_HEADS) for s in (query, key) for p in s.placements)
    pieces = [s.shards_of(_HEADS) for s in (query, key)]
    if not plain or pieces[0] != pieces[1] or key.shape[_HEADS] % pieces[1]:
        return 1  # a device's query heads are not just those of the keys it has
    heads, size = key.shape[_HEADS] // pieces[1], prod(key.local_shape(0)) * key.dtype.itemsize
    return next((n for n in _PARTS if heads and heads % n == 0 and size >= n * _PART_BYTES), 1)


def rounds_of(rounds: Rounds, count: int) -> Rounds:
    """The sends for one of so many parts of the heads."""
    return tuple(
        tuple((slot, Step(s.kind, s.axis, _fewer(s.src, count), _fewer(s.dst, count))) for slot, s in row) for row in rounds
    )


def _fewer(spec: TensorSpec, count: int) -> TensorSpec:
    """The spec of one of so many parts of the heads."""
    if count == 1:
        return spec
    shape = tuple(n // count if d == _HEADS else n for d, n in enumerate(spec.shape))
    return TensorSpec(spec.mesh, spec.placements, shape, dense_strides(shape, spec.shape, spec.stride), spec.dtype)


def _narrow(t: torch.Tensor, dim: int, i: int, count: int) -> torch.Tensor:
    n = t.shape[dim] // count
    return t.narrow(dim, i * n, n)


def _some_heads(ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any], i: int, count: int) -> Arguments:
    """The ``i``-th part of the heads of all tensors; a mask may be one for all of them."""

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name != "attn_mask":
            return _narrow(value, _HEADS, i, count)
        return _narrow(value, -3, i, count) if value.dim() > 2 and value.shape[-3] > 1 else value

    names = [a.name for a in ctx.op._schema.arguments]
    positional = tuple(part(name, value) for name, value in zip(names, args, strict=False))
    return positional, {name: part(name, value) for name, value in kwargs.items()}


class _Part:
    """Some spans of a dimension among those that lie one after the other in the local tensors, all or one of them."""

    def __init__(self, wanted: tuple[Span, ...], held: tuple[Span, ...]) -> None:
        self.spans = wanted
        before = () if wanted == held else held[: held.index(wanted[0])]
        self._start = sum(b - a for a, b in before)
        self._length = sum(b - a for a, b in wanted)

    def of(self, tensor: torch.Tensor, dim: int = -2) -> torch.Tensor:
        """The part of a local tensor, as a view."""
        return tensor.narrow(dim, self._start, self._length)


class _Block:
    """Query rows against one block of keys and values on one device: what the fused kernel must be given.

    A causal block is made for one span of rows and one of columns, so that those of which nothing is seen are left out
    and only those on the diagonal are masked; others take all spans at once.
    """

    def __init__(
        self, ctx: Context, arguments: Arguments, key: torch.Tensor, value: torch.Tensor, rows: _Part, columns: _Part
    ) -> None:
        args, kwargs = arguments
        slot = ctx.index("query")
        self.rows, self.columns = rows, columns
        self.query, key, value = rows.of(args[slot]), columns.of(key), columns.of(value)
        self._all = key.shape
        self.heads = _picked_heads(ctx, slot, key)
        if self.heads is not None:
            key, value = key.index_select(-3, self.heads), value.index_select(-3, self.heads)
        self.key, self.value = key, value
        self.scale = ctx.argument(args, kwargs, "scale")
        self.mask = _mask(ctx.argument(args, kwargs, "attn_mask"), columns.spans, self.query.dtype)
        if self.mask is not None and self.mask.dim() > 1 and self.mask.shape[-2] != 1:
            self.mask = rows.of(self.mask)
        self.seen = bool(key.shape[-2] and self.query.numel())
        if ctx.argument(args, kwargs, "is_causal"):
            ((first, last),), ((start, stop),) = rows.spans, columns.spans
            self.seen = self.seen and start < last
            if self.seen and stop - 1 > first:
                shape = (last - first, stop - start)
                hidden = torch.ones(shape, dtype=torch.bool, device=key.device).triu_(1 + first - start)
                causal = torch.zeros(shape, dtype=self.query.dtype, device=key.device).masked_fill_(hidden, float("-inf"))
                self.mask = causal if self.mask is None else self.mask + causal

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and logarithm of sums of this block."""
        if self.query.is_cuda:
            out, sums, *_ = aten._scaled_dot_product_efficient_attention.default(
                self.query, self.key, self.value, self.mask, True, 0.0, False, scale=self.scale
            )
            sums = sums[..., : self.query.shape[-2]]
        else:
            out, sums = aten._scaled_dot_product_flash_attention_for_cpu.default(
                self.query, self.key, self.value, 0.0, False, attn_mask=self.mask, scale=self.scale
            )
        # A row that sees nothing of this block weighs nothing.
        blind = ~torch.isfinite(sums)
        if self.mask is not None:
            blind = blind | torch.isneginf(self.mask).all(-1)
        return out.masked_fill(blind.unsqueeze(-1), 0), sums.masked_fill(blind, float("-inf"))

    def backward(self, grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of query, keys and values; the last two of all heads held here."""
        query, key, value = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, self.query, self.key, self.value, out, sums, 0.0, False, attn_mask=self.mask, scale=self.scale
        )
        return [query, self._whole(key), self._whole(value)]

    def _whole(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.heads is None:
            return gradient
        shape = (*gradient.shape[:-3], self._all[-3], *gradient.shape[-2:])
        return gradient.new_zeros(shape).index_add_(-3, self.heads, gradient)


def _picked_heads(ctx: Context, slot: int, key: torch.Tensor) -> torch.Tensor | None:
    """Which of the key's local heads each local query head uses; ``None`` when they correspond one to one."""
    total, kept = ctx.inputs[slot].shape[-3], ctx.inputs[slot + 1].shape[-3]
    if total == kept:
        return None
    first = ctx.inputs[slot + 1].spans(ctx.position)[-3][0][0]
    return indices(ctx.inputs[slot].spans(ctx.position)[-3], key.device) * kept // total - first


def _mask(mask: torch.Tensor | None, columns: tuple[Span, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """The block's columns of a mask, as something to add."""
    if mask is None:
        return None
    if mask.shape[-1] != 1:
        mask = mask[..., columns[0][0] : columns[0][1]] if len(columns) == 1 else mask[..., indices(columns, mask.device)]
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return mask


def _blocks(
    ring: Ring, k: int, arguments: Arguments, layout: MeshLayout, key: torch.Tensor, value: torch.Tensor
) -> Iterator[_Block]:
    """What local device ``k`` computes with the keys and values that it has in a round."""
    ctx = ring.contexts[k]
    rows, columns = ctx.inputs[ctx.index("query")].spans(ctx.position)[-2], ring.columns(layout, k)
    pairs = [(rows, columns)]
    if ctx.argument(*arguments, "is_causal"):
        pairs = [((row,), (column,)) for row in rows for column in columns]
    for some_rows, some_columns in pairs:
        block = _Block(ctx, arguments, key, value, _Part(some_rows, rows), _Part(some_columns, columns))
        if block.seen:
            yield block


def ring_attention(ring: Ring, arguments: Sequence[Arguments]) -> list[Any]:
    """Raw results on each local device: the output, and for the fused operator the logarithm of sums."""
    results: list[list[torch.Tensor]] = []
    for ctx, (args, _) in zip(ring.contexts, arguments, strict=True):
        query = args[ctx.index("query")]
        shape, wide = ctx.output_shape(0), torch.promote_types(query.dtype, torch.float32)
        sums = torch.full(shape[:-1], float("-inf"), dtype=wide, device=query.device)
        results.append([torch.zeros(shape, dtype=wide, device=query.device), sums])
        ring.hold(results[-1])
    for part, some, made in ring.parts(arguments, results):
        _attend(part, some, made)
    dtype = arguments[0][0][ring.slots[0]].dtype
    return [out.to(dtype) if len(ring.plan.results) == 1 else (out.to(dtype), sums) for out, sums in results]


def _attend(ring: Ring, arguments: Sequence[Arguments], results: Sequence[Sequence[torch.Tensor]]) -> None:
    """Combine what all blocks give into results that are zeros, and sums that are minus infinity, before."""
    key, value = ([args[slot] for args, _ in arguments] for slot in ring.slots)
    for r, layout in enumerate(ring.layouts()):
        if r:
            key = ring.send(r - 1, 0, key)  # the old one goes before the other's comes
            value = ring.send(r - 1, 1, value)
        for k, (out, sums) in enumerate(results):
            for block in _blocks(ring, k, arguments[k], layout, key[k], value[k]):
                _combine(block.rows.of(out), block.rows.of(sums, -1), *block.forward())


def _combine(out: torch.Tensor, sums: torch.Tensor, more: torch.Tensor, more_sums: torch.Tensor) -> None:
    """Add a part of a softmax to what there is of it, in place."""
    total = torch.logaddexp(sums, more_sums)
    blind = torch.isneginf(total)
    old, new = (torch.exp(s - total).masked_fill_(blind, 0).unsqueeze(-1) for s in (sums, more_sums))
    out.mul_(old).add_(more * new)
    sums.copy_(total)


def ring_attention_backward(ring: Ring, arguments: Sequence[Arguments]) -> list[Any]:
    """Gradients of query, key and value; those of a block travel with it and come home with the last send."""
    results: list[list[torch.Tensor]] = []
    for ctx, (args, _) in zip(ring.contexts, arguments, strict=True):
        slots = (ctx.index("query"), *ring.slots)
        results.append([torch.zeros_like(args[slot]) for slot in slots])
        ring.hold(results[-1])
    for part, some, made in ring.parts(arguments, results):
        _attend_backward(part, some, made)
    return [tuple(gradients) for gradients in results]


def _attend_backward(ring: Ring, arguments: Sequence[Arguments], results: Sequence[Sequence[torch.Tensor]]) -> None:
    """Add the gradients to results that are zeros before."""
    key, value = ([args[slot] for args, _ in arguments] for slot in ring.slots)
    query_grads, key_grads, value_grads = ([tensors[i] for tensors in results] for i in range(3))
    last = len(ring.plan.rounds) - 1
    for r, layout in enumerate(ring.layouts()):
        for k, ctx in enumerate(ring.contexts):
            args, _ = arguments[k]
            grad, out, sums = (args[ctx.index(n)] for n in ("grad_out", "out", "logsumexp"))
            for block in _blocks(ring, k, arguments[k], layout, key[k], value[k]):
                rows = block.rows
                grads = block.backward(rows.of(grad), rows.of(out), rows.of(sums, -1))
                rows.of(query_grads[k]).add_(grads[0])
                block.columns.of(key_grads[k]).add_(grads[1])
                block.columns.of(value_grads[k]).add_(grads[2])
        if r < last:
            key = ring.send(r, 0, key)
            value = ring.send(r, 1, value)
        key_grads = ring.send(r, 0, key_grads)
        value_grads = ring.send(r, 1, value_grads)
    for tensors, *home in zip(results, key_grads, value_grads, strict=True):
        for mine, came in zip(tensors[1:], home, strict=True):
            mine.copy_(came)


RINGS: dict[str, Callable[[Ring, Sequence[Arguments]], list[Any]]] = {
    "ring_attention": ring_attention,
    "ring_attention_backward": ring_attention_backward,
}
