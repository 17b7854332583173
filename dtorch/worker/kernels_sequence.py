"""Kernels of attention and of recurrent cells."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dtorch.worker.kernels import Context, kernel, stand_in
from dtorch.worker.kernels_nn import call_with, is_empty, nothing


# -- attention -----------------------------------------------------------------------------------------------------------
class _Keys:
    """Keys and values for the query's piece held here.

    Where all heads of key and value are here but not all query heads, those in use are picked. Where causal rows do not
    start at the first, columns behind the last row go and a mask takes the place of the causal one, which torch counts
    from the top left corner: row i sees columns up to i.
    """

    def __init__(self, ctx: Context, slot: int, key: torch.Tensor, value: torch.Tensor, causal: bool) -> None:
        query = ctx.inputs[slot]
        box = ctx.input_box(slot)
        self._shape = key.shape
        self._heads: torch.Tensor | None = None
        if query.ndim > 2 and box[-3] != (0, query.shape[-3]) and ctx.input_box(slot + 1)[-3] != box[-3]:
            total = ctx.inputs[slot + 1].shape[-3]
            if total > 1 and key.shape[-3] == total:
                self._heads = torch.arange(*box[-3], device=key.device) * total // query.shape[-3]
                key, value = key.index_select(-3, self._heads), value.index_select(-3, self._heads)
        first, last = box[-2]
        self.changes: dict[str, Any] = {}
        if causal and first:
            stop = min(last, key.shape[-2])
            key, value = key[..., :stop, :], value[..., :stop, :]
            seen = torch.ones(last - first, stop, dtype=torch.bool, device=key.device).tril_(first)
            self.changes = {"attn_mask": seen, "is_causal": False}
        self.changes |= {"key": key, "value": value}

    def whole(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of all keys or values: zeros for those not used here."""
        gradient = F.pad(gradient, (0, 0, 0, self._shape[-2] - gradient.shape[-2]))
        if self._heads is None:
            return gradient
        shape = (*self._shape[:-1], gradient.shape[-1])
        return gradient.new_zeros(shape).index_add_(-3, self._heads, gradient)

    def added(self, dtype: torch.dtype) -> dict[str, Any]:
        """The changes with a mask to add, as the fused kernel wants it, in place of a boolean one."""
        seen = self.changes.get("attn_mask")
        if seen is None:
            return self.changes
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return {**self.changes, "attn_mask": mask}
