"""Sequence parallelism: between the tensor-parallel parts of a model, activations are cut along the sequence by ``tp``.

Attention and feed-forward blocks get the whole sequence and leave sums. Reduced and cut at once, a sum costs half of an
all-reduce, and the gathering before the next block the other half; norms, residuals and dropout in between handle a share
each, and keep a share for the backward. (Korthikanti et al., Reducing Activation Recomputation, 2022.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from dtorch.client.tensor import DTensor
from dtorch.core.placements import REPLICATE, Partial, Placement, Shard
from dtorch.parallel.inputs import map_tensors

_SEQUENCE = 1
_Change = Callable[[torch.Tensor], torch.Tensor]


def cut_between(module: nn.Module, names: Collection[str], axes: Sequence[int]) -> None:
    """Cut the sequence, dimension 1 of (samples, rows, features), outside of the blocks with cut parameters.

    Args:
        module: placed.
        names: of its parameters that ``tp`` cuts.
        axes: those of ``tp``, in the meshes of its stages.
    """

    def changed(when: type[Placement], then: Placement) -> _Change:
        def change(t: torch.Tensor) -> torch.Tensor:
            if not isinstance(t, DTensor) or t.dim() != 3 or t.shape[_SEQUENCE] == 1:
                return t
            where = [then if a in axes and _is(p, when) else p for a, p in enumerate(t.placements)]
            return t if where == list(t.placements) else t.redistribute(placements=where)

        return change

    whole, cut = changed(Shard, REPLICATE), changed(Partial, Shard(_SEQUENCE))
    for block in {_block(module, name.rpartition(".")[0]): None for name in names}:
        part = module.get_submodule(block)
        part.register_forward_pre_hook(
            lambda _m, args, kwargs: (map_tensors(args, whole), map_tensors(kwargs, whole)), with_kwargs=True
        )
        part.register_forward_hook(lambda _m, _args, out: map_tensors(out, cut))


def _is(p: Placement, kind: type[Placement]) -> bool:
    return p.is_shard(_SEQUENCE) if kind is Shard else isinstance(p, kind)


def _block(module: nn.Module, layer: str) -> str:
    """The attention or feed-forward block of a layer with cut parameters; the layer itself where it stands alone."""
    parent = layer.rpartition(".")[0]
    if not parent or any(isinstance(m, nn.ModuleList) and len(m) > 1 for m in module.get_submodule(parent).modules()):
        return layer
    return parent
