"""The most that tensors may occupy on each device of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from dtorch.core.spec import MeshLayout, TensorSpec
from dtorch.worker.program import Program

if TYPE_CHECKING:
    from dtorch.worker.executor import Executor


class Budget:
    """Refuses what does not fit.

    What devices hold is counted only when that could matter: when all that was made since the last count, were nothing of
    it freed, would not fit.

    Args:
        limit: bytes a device.
        executor: whose store is counted.
    """

    def __init__(self, limit: int, executor: Executor) -> None:
        self.limit, self._executor = limit, executor
        self._bounds: dict[int, int] = {}  # device -> it holds at most so much
        self._meshes: dict[int, int] = {}  # tensor -> mesh, of those whose parts are not one for each device here
        self._needs: dict[int, list[int]] = {}  # id of a program, which the executor keeps

    def admit(self, program: Program) -> None:
        """Before the results of a program are made.

        Raises:
            torch.OutOfMemoryError: a device has no room for them.
        """
        needs = self._needs.get(id(program))
        if needs is None:
            plan = program.plan
            new = [s for k in program.new if not plan.results[k].alias and (s := program.made[k]) is not None]
            if not plan.op and not any(steps for _, steps in plan.moves):
                new = []  # another name of the same memory
            needs = self._needs[id(program)] = [sum(local_bytes(s, p) for s in new) for p in program.here]
        self.admit_bytes(dict(zip(self.devices(program.plan.mesh), needs, strict=True)))

    def admit_bytes(self, needs: Mapping[int, int]) -> None:
        """Before so much is made on each device.

        Raises:
            torch.OutOfMemoryError: a device has no room for it.
        """
        bounds = self._bounds
        if any(bounds.get(device, 0) + need > self.limit for device, need in needs.items()):
            bounds = self._bounds = self._count()
        for device, need in needs.items():
            held = bounds.get(device, 0)
            if need and held + need > self.limit:
                raise torch.OutOfMemoryError(
                    f"{need:,} bytes more do not fit on device {device}, which holds {held:,} of at most {self.limit:,} bytes "
                    "(memory_limit). Free tensors, or cut them over more devices"
                )
        for device, need in needs.items():
            bounds[device] = bounds.get(device, 0) + need

    def made(self, mesh: int, ids: Sequence[int]) -> None:
        """These tensors lie on this mesh."""
        if len(self._executor.positions[mesh]) != len(self._executor.devices):
            self._meshes.update(dict.fromkeys(ids, mesh))

    def devices(self, mesh: int) -> list[int]:
        """The devices here of a mesh, in its order."""
        layout: MeshLayout = self._executor.meshes[mesh]
        return [layout.devices[p] for p in self._executor.positions[mesh]]

    def _count(self) -> dict[int, int]:
        """What each device holds; memory that several tensors share counts where the first of them lies."""
        executor = self._executor
        store, every = executor.store, executor.devices
        self._meshes = {number: mesh for number, mesh in self._meshes.items() if number in store}
        held: dict[int, int] = {}
        seen: set[int] = set()
        for number, value in store.items():
            if isinstance(value, list):
                mesh = self._meshes.get(number)
                for device, t in zip(every if mesh is None else self.devices(mesh), value, strict=False):
                    storage = t.untyped_storage()
                    if storage.data_ptr() not in seen:
                        seen.add(storage.data_ptr())
                        held[device] = held.get(device, 0) + storage.nbytes()
        return held


def local_bytes(spec: TensorSpec, position: int) -> int:
    """Bytes of a tensor on the device at this position of its mesh."""
    return prod(spec.local_shape(position)) * spec.dtype.itemsize
