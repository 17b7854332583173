"""Which dimension of which parameter is cut along ``tp``: from the model's own plan, or found by looking at it.

A plan only says where parameters lie. What follows from it for activations the planner finds operator by operator, so
a poor plan costs communication and never a wrong value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dtorch.core.errors import PlacementError
from dtorch.core.placements import Shard

# transformers' plan styles and those of torch.distributed.tensor.parallel, by what they mean for a weight of
# (out_features, in_features): "out", "in", or None for whole.
_STYLES: dict[str, str | None] = {
    "colwise": "out",
    "colwise_rep": "out",
    "colwise_gather_output": "out",
    "packed_colwise": "out",
    "local_colwise": "out",
    "rowwise": "in",
    "rowwise_rep": "in",
    "rowwise_split_input": "in",
    "packed_rowwise": "in",
    "local_rowwise": "in",
    "embedding_rowwise": "vocabulary",
    "embedding_colwise": "hidden",
    "ColwiseParallel": "out",
    "RowwiseParallel": "in",
    "PackedColwiseParallel": "out",  # of diffusers
    "PackedRowwiseParallel": "in",
}

# Styles that say what activations or gradients need, which follows from where parameters lie.
_FOLLOWING = frozenset({
    "replicate", "replicated_with_grad_allreduce", "all_reduce", "local_params", "local", "gather", "mla_kv_a_proj",
    "moe_tp_experts", "moe_identity_expert", "moe_experts_allreduce", "ep_router", "grouped_gemm", "sequence_parallel",
    "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput",
})  # fmt: skip

_OUT = re.compile(
    r"(^|[._])(q|k|v|qkv|query|key|value|query_key_value|c_attn|q_a|q_b|kv_b|in_proj|wi|wi_0|wi_1|w1|w3|gate|up|gate_up|fc1|fc_in|"
    r"lin1|c_fc|dense_h_to_4h|intermediate\.dense|ffn_1|Wqkv|Wi|up_proj|gate_proj|to_q|to_k|to_v|add_q|add_k|add_v|"
    r"net\.0\.proj|linear_1|linear1)(_proj|_lin)?$"
)
_IN = re.compile(
    r"(^|[._])(o|out|wo|w2|down|fc2|fc_out|lin2|c_proj|dense_4h_to_h|out_proj|down_proj|output\.dense|attention\.dense|"
    r"self_attention\.dense|attn\.dense|Wo|to_out\.0|to_add_out|net\.2|linear_2|linear2|out_lin)(_proj|_lin)?$"
)


def own_plan(model: nn.Module) -> dict[str, str]:
    """transformers' tensor-parallel plan of a model: pattern of module or parameter names -> style; maybe empty."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def check_plan(model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Refuse a plan of a user's that names what is not there.

    Raises:
        PlacementError: an unknown style, or a pattern that stands for nothing in the model.
    """
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for pattern, style in plan.items():
        if _style(style) not in _STYLES and _style(style) not in _FOLLOWING:
            known = ", ".join(s for s in _STYLES if s.islower())
            raise PlacementError(f"plan[{pattern!r}] = {style!r} is no known style. Use one of {known}.")
        if not any(map(re.compile(_pattern(pattern)).fullmatch, names)):
            raise PlacementError(
                f"plan[{pattern!r}]: {type(model).__name__} has no module or parameter of that name; {names[-1]!r} is one "
                "that it has, and * stands for one part between dots."
            )


def wants_sequence_parallel(plan: str | Mapping[str, Any]) -> bool:
    """Whether a plan has activations cut along the sequence between its blocks."""
    asking = {"SequenceParallel", "sequence_parallel"}
    return not isinstance(plan, str) and any(_style(style) in asking for style in plan.values())


def cuts(model: nn.Module, plan: Mapping[str, Any] | None) -> dict[str, Shard]:
    """Parameter name -> how to cut it, for a plan of patterns (``*`` matches one name or number)."""
    if plan is None:
        plan = own_plan(model)
        if not any(_STYLES.get(_style(s)) in ("out", "in") for s in plan.values() if s != "colwise_gather_output"):
            return {**found_cuts(model), **_planned(model, plan)}
    return _planned(model, plan)


def _planned(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Shard]:
    compiled = [(re.compile(_pattern(p)), style, _STYLES.get(_style(style))) for p, style in plan.items()]
    found: dict[str, Shard] = {}
    for module, name, parameter in _parameters(model):
        full = f"{module}.{name}" if module else name
        for pattern, style, meaning in compiled:
            if meaning is None or not (pattern.fullmatch(full) or pattern.fullmatch(module)):
                continue
            layer = model.get_submodule(module)
            dim = _dim(layer, name, parameter, meaning)
            if dim is not None:
                found[full] = Shard(dim, _packed(layer, style, parameter.shape[dim]))
    return found


def _packed(layer: nn.Module, style: Any, size: int) -> tuple[int, ...]:
    """Lengths of what is packed along the cut dimension, each to be cut for itself; none where nothing is."""
    if _style(style) == "packed_colwise":
        blocks = [1, 1]  # gate and up
    elif _style(style).startswith("Packed"):
        kind = "col" if "Col" in _style(style) else "row"
        blocks = style.blocks or getattr(layer, f"_tp_packed_{kind}_blocks", None) or [1]
    else:
        return ()
    unit, rest = divmod(size, sum(blocks))
    return () if rest else tuple(unit * n for n in blocks)


def _style(style: Any) -> str:
    return style if isinstance(style, str) else type(style).__name__


def _pattern(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]+")


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module_name, name, parameter


def _dim(module: nn.Module, name: str, parameter: nn.Parameter, meaning: str) -> int | None:
    """The dimension of a parameter that a style cuts, or ``None``."""
    if isinstance(module, nn.Embedding) or meaning in ("vocabulary", "hidden"):
        return None if parameter.ndim != 2 else 1 if meaning == "hidden" else 0
    transposed = type(module).__name__ == "Conv1D"  # transformers' GPT-2 layer keeps (in, out)
    if parameter.ndim == 1:
        # A bias goes with the output; behind a cut inner dimension it stays whole and is added once.
        return 0 if meaning == "out" and name.endswith("bias") else None
    if parameter.ndim == 2:
        out, inner = (1, 0) if transposed else (0, 1)
        return out if meaning == "out" else inner
    if parameter.ndim == 3:  # one matrix for each expert: (experts, out, in), or (experts, in, out) where transposed
        turned = bool(getattr(module, "is_transposed", False))
        out, inner = (2, 1) if turned else (1, 2)
        return out if meaning == "out" else inner
    return None


def found_cuts(model: nn.Module) -> dict[str, Shard]:
    """A plan for a model that has none: linear layers by the names that such layers have, vocabularies by rows."""
    found: dict[str, Shard] = {}
    for module, name, parameter in _parameters(model):
        layer = model.get_submodule(module)
        full = f"{module}.{name}" if module else name
        is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
        if isinstance(layer, nn.Embedding):
            dim = 0 if name == "weight" and parameter.shape[0] > parameter.shape[1] else None
        elif not is_linear and parameter.ndim != 3:
            continue
        elif _OUT.search(module if is_linear else full):
            dim = _dim(layer, name, parameter, "out")
        elif _IN.search(module if is_linear else full):
            dim = _dim(layer, name, parameter, "in")
        else:
            continue
        if dim is not None:
            found[full] = Shard(dim)
    return found
