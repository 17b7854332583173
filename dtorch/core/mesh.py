"""``DeviceMesh``: named axes over numbered devices. It extends torch's class but forms no process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from dtorch.core.errors import PlacementError, refuse
from dtorch.core.spec import MeshLayout
from dtorch.core.torch_private import MESH_ALONE

# The meshes of the ``with mesh:`` blocks around.
_default: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("dtorch_default_mesh", default=())


class _Blocks(threading.local):
    """The ``with mesh:`` blocks of a thread: torch's current device is the thread's, whichever of its tasks runs."""

    open = 0
    before: Any = None  # torch's current device outside of all of them


_blocks = _Blocks()

# The first mesh that the program made: the default one where no ``with mesh:`` is active.
_first: list[DeviceMesh] = []


def _no_device(_: Any) -> Any:
    return None


# Make a mesh torch's current device, and undo it; set by the client, which knows the index of the mesh's device.
enter_device: Callable[[DeviceMesh], Any] = _no_device
leave_device: Callable[[Any], None] = _no_device

# Spellings of the original project that mean the same axis.
_ALIASES = {"ulysess_cp": "ulysses_cp", "ulysses_cp": "ulysess_cp"}


class DeviceMesh(TorchDeviceMesh):
    """Devices of one type arranged along one or several named axes.

    Args:
        device_type: type of the physical devices on the workers, ``"cpu"`` or ``"cuda"``.
        mesh: device numbers as a nested list or an integer tensor; each number at most once.
        mesh_dim_names: one name per axis.
        graph: the session that owns the mesh; by default the current one.

    Raises:
        PlacementError: negative or repeated device numbers, a ragged list, or a wrong number of names.

    ``with mesh:`` makes it the default for factories called with ``device="dtorch"``.
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        graph: Any = None,
    ) -> None:
        try:
            grid = mesh if isinstance(mesh, torch.Tensor) else torch.tensor(mesh, device="cpu")
        except (TypeError, ValueError, RuntimeError) as e:
            raise PlacementError(
                f"DeviceMesh({device_type!r}, {mesh!r}): the mesh must be a nested list of device numbers ({e})."
            ) from e
        if grid.numel() and (grid.is_floating_point() or grid.is_complex()):
            raise PlacementError(f"DeviceMesh({device_type!r}, {mesh!r}): device numbers must be integers.")
        grid = grid.detach().to("cpu", torch.int64).contiguous()
        grid = grid.reshape(1) if grid.ndim == 0 else grid
        numbers, faults = grid.flatten().tolist(), []
        if not numbers or min(numbers) < 0 or len(set(numbers)) != len(numbers):
            faults.append(f"DeviceMesh({device_type!r}, {mesh!r}): every device number must be >= 0 and occur once.")
        try:
            torch.device(device_type)
        except (RuntimeError, TypeError):
            faults.append(f"DeviceMesh({device_type!r}, {mesh!r}): torch knows no devices called {device_type!r}.")
        names = tuple(mesh_dim_names) if mesh_dim_names is not None else None
        if names is not None and (len(names) != grid.ndim or len(set(names)) != len(names)):
            faults.append(f"mesh_dim_names={names} for a mesh of {grid.ndim} axes: give one distinct name per axis.")
        refuse(faults)
        super().__init__(device_type, grid.to(torch.int32), mesh_dim_names=names, **MESH_ALONE)
        self._grid = grid
        self._graph = graph
        self._layout_id: MeshLayout | None = None
        if not _first:
            _first.append(self)

    # -- identity ---------------------------------------------------------------------------------------------------
    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two meshes of one session the same."""
        return (self.device_type, tuple(self._grid.shape), tuple(self._grid.flatten().tolist()), self.mesh_dim_names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh) or self.key != other.key:
            return False
        # One that no session has used yet may become either's.
        return self._graph is other._graph or self._graph is None or other._graph is None

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        names = f", mesh_dim_names={self.mesh_dim_names}" if self.mesh_dim_names else ""
        return f"DeviceMesh({self.device_type!r}, {self._grid.tolist()}{names})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (self.device_type, self._grid.tolist(), self.mesh_dim_names))

    # -- shape ------------------------------------------------------------------------------------------------------
    @property
    def mesh(self) -> torch.Tensor:
        """Device numbers as an integer tensor of the mesh's shape."""
        return self._grid if hasattr(self, "_grid") else super().mesh

    @property
    def devices(self) -> tuple[int, ...]:
        """Device numbers in row-major order."""
        return tuple(self._grid.flatten().tolist())

    def axis(self, name: str | int) -> int:
        """Index of a mesh axis given by name or index.

        Raises:
            PlacementError: the mesh has no such axis.
        """
        if isinstance(name, int):
            if -self.ndim <= name < self.ndim:
                return name % self.ndim
            raise PlacementError(f"{self} has no axis {name}: it has {self.ndim}.")
        names = self.mesh_dim_names or ()
        for spelling in (name, _ALIASES.get(name)):
            if spelling in names:
                return names.index(spelling)
        raise PlacementError(f"{self} has no axis {name!r}: its axes are {list(names) or 'unnamed'}.")

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Number of devices, of the whole mesh or along one axis."""
        return self._grid.numel() if mesh_dim is None else self._grid.shape[self.axis(mesh_dim)]

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Always ``None``: the program runs outside of the devices and has no rank."""
        return None

    # -- sub-meshes -------------------------------------------------------------------------------------------------
    def _sub(self, grid: torch.Tensor, names: Sequence[str] | None) -> DeviceMesh:
        return DeviceMesh(self.device_type, grid, mesh_dim_names=names, graph=self._graph)

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh along the named axes through the first device of the others."""
        wanted = [self.axis(n) for n in ((names,) if isinstance(names, str) else names)]
        grid = self._grid.permute(*wanted, *(a for a in range(self.ndim) if a not in wanted))
        for _ in range(self.ndim - len(wanted)):
            grid = grid[..., 0]
        return self._sub(grid, [str((self.mesh_dim_names or ())[a]) for a in wanted])

    def unbind(self, mesh_dim: str | int) -> list[DeviceMesh]:
        """One sub-mesh without the axis for each coordinate on it (one device along a last axis: a mesh of size 1)."""
        a = self.axis(mesh_dim)
        names = [n for i, n in enumerate(self.mesh_dim_names) if i != a] if self.mesh_dim_names else None
        parts = self._grid.unbind(a)
        if self.ndim == 1:
            return [self._sub(p.reshape(1), self.mesh_dim_names) for p in parts]
        return [self._sub(p, names) for p in parts]

    # -- default mesh -----------------------------------------------------------------------------------------------
    def __enter__(self) -> DeviceMesh:
        before = enter_device(self)
        if not _blocks.open:
            _blocks.before = before
        _blocks.open += 1
        _default.set((*_default.get(), self))
        return self

    def __exit__(self, *exc: object) -> None:
        outer = _default.get()[:-1]
        _default.set(outer)
        _blocks.open -= 1
        if outer:
            enter_device(outer[-1])
        else:
            leave_device(_blocks.before)

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("A DeviceMesh is not iterable; use mesh.unbind(axis) or mesh.devices.")


def _rebuild(device_type: str, grid: Any, names: tuple[str, ...] | None) -> DeviceMesh:
    return DeviceMesh(device_type, grid, mesh_dim_names=names)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost ``with mesh:``, or ``None``."""
    stack = _default.get()
    return stack[-1] if stack else None


KINDS = ("dp", "tp", "pp", "ulysses_cp", "ulysess_cp", "ring_cp", "ep")


def axis_kind(name: str) -> str:
    """What an axis of this name is for: the name, or its start before ``_``, spelled correctly; "" if for nothing known."""
    for kind in KINDS:
        if name == kind or name.startswith(f"{kind}_"):
            return "ulysses_cp" if kind == "ulysess_cp" else kind
    return ""


def axis_kinds(mesh: DeviceMesh) -> tuple[str, ...]:
    """The kind of each axis of a mesh."""
    return tuple(map(axis_kind, mesh.mesh_dim_names)) if mesh.mesh_dim_names else ("",) * mesh.ndim


def first_mesh() -> DeviceMesh | None:
    """The first mesh that the program made, or ``None``."""
    return _first[0] if _first else None


def select_mesh(mesh: DeviceMesh) -> None:
    """Make a mesh the default one until the innermost ``with mesh:`` ends; outside of all, until the sessions do."""
    enter_device(mesh)
    _default.set((*_default.get()[:-1], mesh))


def forget_first_mesh() -> None:
    """The next mesh made becomes the default, and torch's current device the first one; at the end of all sessions."""
    _first.clear()
    if not _blocks.open:
        _default.set(())  # what was selected outside of every block
    leave_device(0)


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh over devices 0, 1, 2, ... in row-major order.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh_shape: number of devices along each axis.
        mesh_dim_names: one name per axis.

    Raises:
        PlacementError: a size below one, or a wrong number of names.
    """
    shape = tuple(mesh_shape) if isinstance(mesh_shape, Sequence) else ()
    if not shape or any(not isinstance(n, int) or n < 1 for n in shape):
        raise PlacementError(f"mesh_shape={mesh_shape}: give one size of at least 1 for each axis.")
    count = 1
    for n in shape:
        count *= n
    return DeviceMesh(device_type, torch.arange(count).reshape(shape), mesh_dim_names=mesh_dim_names)
