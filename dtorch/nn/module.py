"""``Module``: torch's, with hooks that place what goes in and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtorch.client.tensor import DTensor
from dtorch.core.mesh import DeviceMesh
from dtorch.parallel.inputs import map_tensors, on_mesh

Where = Sequence[Any] | Mapping[str, Any]


class Module(torch.nn.Module):
    """A ``torch.nn.Module`` whose inputs and outputs can be redistributed without touching its ``forward``."""

    def redistribute_input(self, where: Where, device_mesh: DeviceMesh | None = None) -> None:
        """Before every call, place the tensor arguments.

        Args:
            where: placements, one per mesh axis; or a dict of axis names to placements, other axes staying as they are.
            device_mesh: bring them to this mesh first.
        """
        self.register_forward_pre_hook(
            lambda _, args, kwargs: (_placed(args, where, device_mesh), _placed(kwargs, where, device_mesh)),
            with_kwargs=True,
        )

    def redistribute_output(self, where: Where, device_mesh: DeviceMesh | None = None) -> None:
        """After every call, place the tensors of the result; arguments as of ``redistribute_input``."""
        self.register_forward_hook(lambda _, args, output: _placed(output, where, device_mesh))


def _placed(value: Any, where: Where, mesh: DeviceMesh | None) -> Any:
    def change(t: torch.Tensor) -> torch.Tensor:
        if mesh is not None:
            t = on_mesh(t, mesh)
        if not isinstance(t, DTensor):
            return t
        if isinstance(where, Mapping):
            return t.redistribute_by_dict(dict(where), default_placement_mode="keep")
        return t.redistribute(placements=where)

    return map_tensors(value, change)
