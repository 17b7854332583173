"""Linear layers and embeddings cut along a mesh axis, written as on one device.

What follows for activations the planner finds: a column-parallel layer gives results cut along their last dimension, a
row-parallel one gives terms of a sum. The ``WithReplicateOutput`` forms bring their result to every device of the axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dtorch.client.tensor import DTensor, distribute_tensor
from dtorch.core.errors import PlacementError
from dtorch.core.mesh import DeviceMesh, current_mesh
from dtorch.core.placements import Placement, Replicate, Shard
from dtorch.nn.module import Module


class _Cut(Module):
    """What the layers share: a mesh, the axes that cut them, and parameters placed when they are made.

    Args:
        device_mesh: by default that of ``with mesh:``.
        axis: name or names of the mesh axes that cut the layer; those that the mesh lacks cut nothing.
    """

    def __init__(self, device_mesh: DeviceMesh | None, axis: str | Sequence[str]) -> None:
        super().__init__()
        mesh = device_mesh or current_mesh()
        if mesh is None:
            raise PlacementError(f"{type(self).__name__} needs a mesh: give device_mesh= or make it within `with mesh:`.")
        self.device_mesh = mesh
        names = mesh.mesh_dim_names or ()
        wanted = (axis,) if isinstance(axis, str) else tuple(axis)
        self.axes = [a for a, name in enumerate(names) if name in wanted]

    def _parameter(self, value: torch.Tensor, dim: int | None) -> nn.Parameter:
        where: list[Placement] = [Replicate()] * self.device_mesh.ndim
        for a in self.axes:
            if dim is not None:
                where[a] = Shard(dim)
        return nn.Parameter(distribute_tensor(value.detach(), self.device_mesh, where))

    def _whole(self, t: torch.Tensor) -> torch.Tensor:
        assert isinstance(t, DTensor), "a layer with distributed weights gives distributed results"
        where: list[Placement] = list(t.placements)
        for a in self.axes:
            where[a] = Replicate()
        return t.redistribute(placements=where)


class _Linear(_Cut):
    _dim: int  # of the weight (out_features, in_features) that is cut

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, device_mesh: DeviceMesh | None = None,
        axis: str | Sequence[str] = "tp", dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device_mesh, axis)
        self.in_features, self.out_features = in_features, out_features
        plain = nn.Linear(in_features, out_features, bias, device="cpu", dtype=dtype)
        self.weight = self._parameter(plain.weight, self._dim)
        self.bias = self._parameter(plain.bias, 0 if self._dim == 0 else None) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Sizes and mesh axes."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, axes={self.axes}"


class ColumnParallelLinear(_Linear):
    """A linear layer whose output features are cut; its result is cut along the last dimension.

    Args:
        in_features, out_features, bias, dtype: as of ``torch.nn.Linear``.
        device_mesh: by default that of ``with mesh:``.
        axis: mesh axes that cut it.

    Raises:
        PlacementError: there is no mesh.
    """

    _dim = 0


class RowParallelLinear(_Linear):
    """A linear layer whose input features are cut; its result waits to be summed, the bias counts once.

    Args:
        in_features, out_features, bias, device_mesh, axis, dtype: as of ``ColumnParallelLinear``.
    """

    _dim = 1


class _ReplicateOutput(_Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As without, and then whole on every device of the axes."""
        return self._whole(super().forward(x))


class ColumnParallelLinearWithReplicateOutput(_ReplicateOutput, ColumnParallelLinear):
    """A column-parallel layer whose result is gathered."""


class RowParallelLinearWithReplicateOutput(_ReplicateOutput, RowParallelLinear):
    """A row-parallel layer whose result is summed."""


class EmbeddingWithReplicateOutput(_Cut):
    """An embedding whose vocabulary is cut; its result is whole on every device of the axes.

    Args:
        num_embeddings, embedding_dim, dtype: as of ``torch.nn.Embedding``.
        device_mesh: by default that of ``with mesh:``.
        axis: mesh axes that cut it.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, device_mesh: DeviceMesh | None = None,
        axis: str | Sequence[str] = "tp", dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(device_mesh, axis)
        self.weight = self._parameter(nn.Embedding(num_embeddings, embedding_dim, device="cpu", dtype=dtype).weight, 0)

    def forward(self, ids: torch.Tensor) -> Any:
        """(...) -> (..., embedding_dim)."""
        return self._whole(torch.nn.functional.embedding(ids, self.weight))
