"""Views that share memory, also when their devices cannot.

Where every device can view its own piece, worker tensors alias as in torch and nothing is done here but counting
writes. Where a view needs data of other devices it is a copy: it is taken again after the base was written, and what
is written to it is written back.
"""

from __future__ import annotations

from typing import Any

import torch

from dtorch.client.handle import CopiedView, Family, Handle
from dtorch.core.placements import REPLICATE


def join(new: Handle, base: Handle) -> None:
    """``new`` shares the memory of ``base``."""
    if base.family is None:
        base.family = Family(base)
    new.family = base.family


def wrote(t: Any) -> None:
    """Something was written through this tensor."""
    h: Handle = t._h
    if h.family is not None:
        h.family.version += 1
        if h.view is not None:
            h.view.version = h.family.version  # it shows the newest; taking it again would undo the write
            h.view.write_back(t)
            h.view.version = h.family.version


def refresh(t: Any) -> None:
    """Take a copied view again when its base has been written since."""
    h: Handle = t._h
    view, family = h.view, h.family
    if view is None or family is None or view.version == family.version:
        return
    with h.session.lock:  # threads may read one view at once
        if view.version != family.version:
            fresh = view.replay()
            h.id, fresh._h.id = fresh._h.id, h.id
            h.spec = fresh._h.spec
            view.version = family.version


def register_copies(
    cls: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outs: list[Any], plan: Any
) -> None:
    """Remember how the results of a copying view call can be taken again and written back."""
    base = next(a for a in (*args, *kwargs.values()) if type(a) is cls)
    for i, (out, r) in enumerate(zip(outs, plan.results, strict=True)):
        if r.alias is not None and not r.same:
            _register(func, args, kwargs, base, out, i)


def inherit(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: Any, out: Any, index: int) -> None:
    """A view of a copied view is as stale and as written back as its base."""
    _register(func, args, kwargs, base, out, index)


def _register(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], base: Any, out: Any, index: int) -> None:
    join(out._h, base._h)

    def replay() -> Any:
        with torch.no_grad():
            again = func(*args, **kwargs)
        return again if isinstance(again, torch.Tensor) else again[index]

    def write_back(written: Any) -> None:
        # In a whole copy of the base the same view is none of other devices' data: writing to it writes the copy.
        with torch.no_grad():
            whole = base.redistribute(placements=[REPLICATE] * len(base.placements)).clone()
            swap = tuple(whole if a is base else a for a in args)
            shown = func(*swap, **{k: whole if v is base else v for k, v in kwargs.items()})
            (shown if isinstance(shown, torch.Tensor) else shown[index]).copy_(written)
            base.copy_(whole)

    family = out._h.family
    assert family is not None
    out._h.view = CopiedView(base._h, replay, write_back, family.version)
