"""Ring attention: every device keeps its rows of the query while blocks of keys and values go round.

What a block gives is combined by the logarithm of each row's sum, so no device ever holds more than two blocks.
(Liu et al., Ring Attention with Blockwise Transformers, 2023; the combination is that of FlashAttention.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtorch.core.spec import MeshLayout
from dtorch.core.steps import Step
from dtorch.protocol.plans import WirePlan
from dtorch.worker.kernels import Context

aten = torch.ops.aten
Exchange = Callable[[Step, list[torch.Tensor]], list[torch.Tensor]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Ring:
    """The devices of this worker on a ring.

    Args:
        plan: with the sends in ``rounds``.
        contexts: one a local device.
        positions: local positions by mesh id.
        exchange: runs one step.
    """

    def __init__(
        self, plan: WirePlan, contexts: Sequence[Context], positions: dict[int, list[int]], exchange: Exchange
    ) -> None:
        self.plan, self.contexts, self._positions, self._exchange = plan, contexts, positions, exchange
        self.slots = [slot for slot, _ in plan.rounds[0]]
        self._mesh = plan.rounds[0][0][1].src.mesh

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

    def columns(self, layout: MeshLayout, k: int) -> tuple[int, int]:
        """First and last column of the block that local device ``k`` has in a round."""
        device = self._mesh.devices[self.contexts[k].position]
        spec = self.contexts[k].inputs[self.slots[0]]
        return spec.box(layout.devices.index(device))[-2]

    def send(self, r: int, which: int, local: list[torch.Tensor]) -> list[torch.Tensor]:
        """Round ``r``'s send of tensors like slot ``slots[which]``; one a local device, in their order."""
        step = self.plan.rounds[r][which][1]
        moved = self._exchange(step, self._order(local, self._mesh, step.src.mesh))
        return self._order(moved, step.dst.mesh, self._mesh)

    def _order(self, local: list[torch.Tensor], have: MeshLayout, want: MeshLayout) -> list[torch.Tensor]:
        devices = [have.devices[p] for p in self._positions[have.id]]
        return [local[devices.index(want.devices[p])] for p in self._positions[want.id]]


class _Block:
    """Query rows against one block of keys and values on one device: what the fused kernel must be given."""

    def __init__(
        self, ctx: Context, arguments: Arguments, key: torch.Tensor, value: torch.Tensor, columns: tuple[int, int]
    ) -> None:
        args, kwargs = arguments
        self.ctx = ctx
        slot = ctx.index("query")
        self.query = args[slot]
        rows = ctx.input_box(slot)[-2]
        self._all = key.shape
        self.heads = _picked_heads(ctx, slot, key)
        if self.heads is not None:
            key, value = key.index_select(-3, self.heads), value.index_select(-3, self.heads)
        self.key, self.value = key, value
        self.scale = ctx.argument(args, kwargs, "scale")
        self.mask = _mask(ctx.argument(args, kwargs, "attn_mask"), columns, self.query.dtype)
        self.seen = bool(key.shape[-2] and self.query.numel())
        if ctx.argument(args, kwargs, "is_causal"):
            self.seen = self.seen and columns[0] < rows[1]
            if columns[1] - 1 > rows[0]:
                shape = (rows[1] - rows[0], columns[1] - columns[0])
                hidden = torch.ones(shape, dtype=torch.bool, device=key.device).triu_(1 + rows[0] - columns[0])
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
    first = ctx.input_box(slot + 1)[-3][0]
    return torch.arange(*ctx.input_box(slot)[-3], device=key.device) * kept // total - first


def _mask(mask: torch.Tensor | None, columns: tuple[int, int], dtype: torch.dtype) -> torch.Tensor | None:
    """The block's columns of a mask, as something to add."""
    if mask is None:
        return None
    if mask.shape[-1] != 1:
        mask = mask[..., columns[0] : columns[1]]
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
    return mask


def ring_attention(ring: Ring, arguments: Sequence[Arguments]) -> list[Any]:
    """Raw results on each local device: the output, and for the fused operator the logarithm of sums."""
    key, value = ([args[slot] for args, _ in arguments] for slot in ring.slots)
    state: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(arguments)
    for r, layout in enumerate(ring.layouts()):
        if r:
            key, value = ring.send(r - 1, 0, key), ring.send(r - 1, 1, value)
        for k, ctx in enumerate(ring.contexts):
            block = _Block(ctx, arguments[k], key[k], value[k], ring.columns(layout, k))
            if block.seen:
                state[k] = _combine(state[k], *block.forward())
    results = []
    for k, ctx in enumerate(ring.contexts):
        args, _ = arguments[k]
        query = args[ctx.index("query")]
        made = state[k]
        if made is None:
            shape = ctx.output_shape(0)
            made = torch.zeros(shape, device=query.device), torch.full(shape[:-1], float("-inf"), device=query.device)
        out = made[0].to(query.dtype)
        results.append(out if len(ring.plan.results) == 1 else (out, made[1]))
    return results


def _combine(
    before: tuple[torch.Tensor, torch.Tensor] | None, out: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of one softmax as one, in single precision at least."""
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    if before is None:
        return out, sums
    total = torch.logaddexp(before[1], sums)
    blind = torch.isneginf(total)
    old = torch.exp(before[1] - total).masked_fill(blind, 0).unsqueeze(-1)
    new = torch.exp(sums - total).masked_fill(blind, 0).unsqueeze(-1)
    return before[0] * old.to(out.dtype) + out * new.to(out.dtype), total


def ring_attention_backward(ring: Ring, arguments: Sequence[Arguments]) -> list[Any]:
    """Gradients of query, key and value; those of a block travel with it and come home with the last send."""
    key, value = ([args[slot] for args, _ in arguments] for slot in ring.slots)
    query_grads: list[torch.Tensor] = []
    key_grads = [torch.zeros_like(k) for k in key]
    value_grads = [torch.zeros_like(v) for v in value]
    for k, ctx in enumerate(ring.contexts):
        query_grads.append(torch.zeros_like(arguments[k][0][ctx.index("query")]))
    last = len(ring.plan.rounds) - 1
    for r, layout in enumerate(ring.layouts()):
        for k, ctx in enumerate(ring.contexts):
            args, _ = arguments[k]
            block = _Block(ctx, arguments[k], key[k], value[k], ring.columns(layout, k))
            if not block.seen:
                continue
            names = ("grad_out", "out", "logsumexp")
            grads = block.backward(*(args[ctx.index(n)] for n in names))
            for total, part in zip((query_grads[k], key_grads[k], value_grads[k]), grads, strict=True):
                total.add_(part)
        if r < last:
            key, value = ring.send(r, 0, key), ring.send(r, 1, value)
        key_grads, value_grads = ring.send(r, 0, key_grads), ring.send(r, 1, value_grads)
    return list(zip(query_grads, key_grads, value_grads, strict=True))


RINGS: dict[str, Callable[[Ring, Sequence[Arguments]], list[Any]]] = {
    "ring_attention": ring_attention,
    "ring_attention_backward": ring_attention_backward,
}
