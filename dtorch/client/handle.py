"""What a distributed tensor holds instead of data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtorch.core.spec import TensorSpec

if TYPE_CHECKING:
    from dtorch.client.session import Session
    from dtorch.client.sites import Site


class Family:
    """Tensors that share memory: a base and its views.

    ``version`` counts writes through any member. A view that had to be copied to other devices (its devices do not
    hold the base's piece) remembers the version it was taken at, and is taken again when that is old. ``root`` is the
    base's handle, as long as that lives; ``number`` its id and ``nbytes`` its size.
    """

    __slots__ = ("copies", "nbytes", "number", "root", "shadow_lost", "version")

    def __init__(self, root: Handle) -> None:
        self.root = weakref.ref(root)
        self.number, self.nbytes = root.id, root.spec.nbytes
        self.version = 0
        self.copies = 0  # copied views ever made; while 0 nobody needs to look at versions
        self.shadow_lost = False


class CopiedView:
    """How to take a copied view again, and how to put what was written to it back."""

    __slots__ = ("base", "replay", "version", "write_back")

    def __init__(
        self, base: Handle, replay: Callable[[], Any], write_back: Callable[[Any], None], version: int
    ) -> None:
        self.base, self.replay, self.write_back, self.version = base, replay, write_back, version


class Handle:
    """Id, spec and session of one tensor on the workers; dropping it frees the tensor there.

    Attributes:
        id: the tensor's number in its session.
        spec: shape, strides, dtype, mesh and placements.
        family: tensors that share its memory; ``None`` until it is viewed.
        site: where in the user's program it was made.
        depth: operators between host data and the shadow.
        odd: whether it is a copied view or has a shadow: the dispatcher looks closer then.
    """

    __slots__ = ("__weakref__", "_shadow", "_view", "depth", "family", "id", "odd", "session", "site", "spec")

    def __init__(self, id_: int, spec: TensorSpec, session: Session, site: Site | None = None) -> None:
        self.id = id_
        self.spec = spec
        self.session = session
        self.site = site
        self.family: Family | None = None
        self._view: CopiedView | None = None
        self._shadow: Any = None
        self.depth = 0
        self.odd = False

    @property
    def view(self) -> CopiedView | None:
        """Set when this is a copied view."""
        return self._view

    @view.setter
    def view(self, value: CopiedView | None) -> None:
        self._view = value
        self.odd = value is not None or self._shadow is not None

    @property
    def shadow(self) -> Any:
        """A host tensor of the same value, or ``None``; see ``wrap.live_shadow``."""
        return self._shadow

    @shadow.setter
    def shadow(self, value: Any) -> None:
        self._shadow = value
        self.odd = value is not None or self._view is not None

    def __del__(self) -> None:
        self.session.buf.append(-self.id)  # in the stream, a negative value frees that tensor
