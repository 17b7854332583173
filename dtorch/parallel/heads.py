"""Attention layers are cut along ``tp`` between heads, where the number of heads does not divide.

Every device then has whole heads: six over four devices are 2, 2, 2 and none, so that the fullest has no more than it
must. Cut anywhere else, as plain pieces of the weights are, parts of heads would be exchanged in every layer.

Where key and value heads, each shared by several query heads, do not divide, a device may need any of them. Each
computes them all then, unless they are more than its query heads: those cost less to gather.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dtorch.core.placements import Shard

_LAYER = r"(_proj|_lin|_layer)?$"
_QUERY = re.compile(r"(q|query|q_b|to_q|add_q|wq|Wq)" + _LAYER)
_SHARED = re.compile(r"(k|v|key|value|to_k|to_v|add_k|add_v|wk|wv)" + _LAYER)
_HEADS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head")
_SHARED_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")


def between_heads(model: nn.Module, cuts: Mapping[str, Shard], parts: int) -> tuple[dict[str, Shard], tuple[str, ...]]:
    """The cuts with those of attention layers between heads, and what a user should know of them.

    Args:
        model: not placed yet.
        cuts: by parameter name.
        parts: number of devices along ``tp``.
    """
    found, notes = dict(cuts), dict[str, list[str]]()
    for path, attention in _attentions(model, cuts) if parts > 1 else ():
        heads, shared = _count(attention, _HEADS), _count(attention, _SHARED_HEADS)
        if not heads:
            continue
        kept, most = shared or heads, -(-heads // parts)
        if heads < parts:
            texts = [f"{heads} heads for tp={parts}: they are gathered, and every device computes attention with all of them"]
        else:
            texts = [f"{heads} heads for tp={parts}: at most {most} on a device"] * bool(heads % parts)
        grouped = kept != heads and kept % parts > 0
        copied = grouped and (kept <= most or kept >= parts)
        if grouped:
            texts.append(f"{kept} key and value heads for tp={parts}: all on every device" + ", gathered" * (not copied))
        for name, p in _parameters(model, path, cuts):
            n, is_shared = p.shape[cuts[name].dim], _SHARED.fullmatch(name.rpartition(".")[0].removeprefix(f"{path}."))
            if is_shared and copied:
                del found[name]
            elif heads > parts and heads % parts and not n % heads and not cuts[name].segments and not (is_shared and grouped):
                found[name] = replace(cuts[name], unit=n // heads)
        if texts:
            notes.setdefault("; ".join(texts), []).append(path)
    return found, tuple(f"{paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {t}." for t, paths in notes.items())


def _attentions(model: nn.Module, cuts: Mapping[str, Shard]) -> Iterator[tuple[str, nn.Module]]:
    """Modules with a linear layer for queries whose results are cut."""
    seen: set[str] = set()
    for name, cut in cuts.items():
        path, _, linear = name.rpartition(".")[0].rpartition(".")
        if cut.dim == 0 and path not in seen and _QUERY.fullmatch(linear):
            seen.add(path)
            yield path, model.get_submodule(path)


def _parameters(model: nn.Module, path: str, cuts: Mapping[str, Shard]) -> Iterator[tuple[str, Any]]:
    """Cut parameters of linear layers in an attention, or in what follows it as its output (BERT)."""
    beside = f"{path.rpartition('.')[0]}.output."
    for name in cuts:
        if name.startswith((f"{path}.", beside)):
            yield name, model.get_parameter(name)


def _count(attention: nn.Module, names: tuple[str, ...]) -> int:
    """The first of these numbers that the module has, or its configuration; 0 without one."""
    owners = (attention, getattr(attention, "config", None))
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), 0)
