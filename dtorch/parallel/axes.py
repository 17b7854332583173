"""Mesh axes by their meaning: ``dp tp pp ulysses_cp ring_cp ep`` in any order, each perhaps more than once.

An axis counts by the start of its name, so ``dp_replicate`` and ``dp_shard`` are two data-parallel axes (HSDP).
"""

from __future__ import annotations

from dtorch.core.errors import PlacementError
from dtorch.core.mesh import KINDS, DeviceMesh, axis_kind


def axes(mesh: DeviceMesh, *kinds: str) -> list[int]:
    """Indices of the mesh's axes of these kinds that have more than one device.

    Raises:
        PlacementError: the mesh has no names, or an unknown one.
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise PlacementError(f"{mesh} has no axis names; make it with mesh_dim_names=('dp', 'tp', ...).")
    known = ", ".join(k for k in KINDS if axis_kind(k) == k)
    for name in names:
        if not axis_kind(name):
            raise PlacementError(
                f"Mesh axis {name!r}: parallelize knows axes named {known} (or such a name and _...)."
            )
    return [a for a, name in enumerate(names) if axis_kind(name) in kinds and mesh.size(a) > 1]
