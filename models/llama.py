"""Our own Llama, written as for one device: where its parameters lie is all that the mesh changes.

Shapes: B sequences, S tokens, E features, H query heads, K key and value heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import nn as dnn


@dataclass(frozen=True, kw_only=True)
class LlamaSettings:
    """Sizes of a Llama (the names are transformers').

    Attributes:
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: added to the mean square before its root.
    """

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


def rotate(x_BHSD: torch.Tensor, positions_S: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding (Su et al., RoFormer, 2021), halves of a head paired as transformers does."""
    half = x_BHSD.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x_BHSD.device, dtype=torch.float32) / half)
    angles = positions_S[:, None].float() * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat([-x_BHSD[..., half:], x_BHSD[..., :half]], -1)
    return x_BHSD * cos + turned * sin


class Attention(dnn.Module):
    """Causal self-attention, heads cut along ``tp``, the sequence along the ``cp`` axes."""

    def __init__(self, s: LlamaSettings) -> None:
        super().__init__()
        self.heads, self.kept, self.theta = s.num_attention_heads, s.num_key_value_heads, s.rope_theta
        self.width = s.hidden_size // s.num_attention_heads
        kept = self.kept * self.width
        self.q_proj = dnn.ColumnParallelLinear(s.hidden_size, s.hidden_size, bias=False)
        self.k_proj = dnn.ColumnParallelLinear(s.hidden_size, kept, bias=False)
        self.v_proj = dnn.ColumnParallelLinear(s.hidden_size, kept, bias=False)
        self.o_proj = dnn.RowParallelLinear(s.hidden_size, s.hidden_size, bias=False)

    def forward(self, x_BSE: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
        """(B, S, E) -> (B, S, E)."""
        batch, length, _ = x_BSE.shape
        q, k, v = (
            project(x_BSE).view(batch, length, heads, self.width).transpose(1, 2)
            for project, heads in ((self.q_proj, self.heads), (self.k_proj, self.kept), (self.v_proj, self.kept))
        )
        q, k = rotate(q, positions_S, self.theta), rotate(k, positions_S, self.theta)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kept)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class MLP(dnn.Module):
    """Gated feed-forward, inner features cut along ``tp``."""

    def __init__(self, s: LlamaSettings) -> None:
        super().__init__()
        self.gate_proj = dnn.ColumnParallelLinear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = dnn.ColumnParallelLinear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = dnn.RowParallelLinear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., E) -> (..., E)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Norm(dnn.Module):
    """Root mean square norm."""

    def __init__(self, s: LlamaSettings, mesh: dtorch.DeviceMesh) -> None:
        super().__init__()
        self.eps = s.rms_norm_eps
        self.weight = nn.Parameter(dtorch.ones(s.hidden_size, device_mesh=mesh))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., E) -> (..., E)."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Layer(dnn.Module):
    """One layer."""

    def __init__(self, s: LlamaSettings, mesh: dtorch.DeviceMesh) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(s, mesh), Norm(s, mesh)
        self.self_attn, self.mlp = Attention(s), MLP(s)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(B, S, E) -> (B, S, E)."""
        x = x + self.self_attn(self.input_layernorm(x), positions)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(dnn.Module):
    """Token ids to logits, on any mesh with axes among ``dp, tp, pp, ulysses_cp, ring_cp``.

    Args:
        settings: sizes.
        mesh: with ``mesh_dim_names``; a ``pp`` axis gives consecutive layers to consecutive stages.
    """

    def __init__(self, settings: LlamaSettings, mesh: dtorch.DeviceMesh) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        self.stages = mesh.unbind("pp") if "pp" in names else [mesh]
        self.assigned = dtorch.assign_layers_to_stages(settings.num_hidden_layers, len(self.stages))
        with self.stages[0]:
            self.embed_tokens = dnn.EmbeddingWithReplicateOutput(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList()
        for stage in self.assigned:
            with self.stages[stage]:
                self.layers.append(Layer(settings, self.stages[stage]))
        with self.stages[-1]:
            self.norm = Norm(settings, self.stages[-1])
            self.lm_head = dnn.ColumnParallelLinear(settings.hidden_size, settings.vocab_size, bias=False)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """(B, S) -> (B, S, vocabulary); plain ids are cut along ``dp`` and the ``cp`` axes."""
        length = ids_BS.shape[1]
        x = self.embed_tokens(_spread(ids_BS, self.stages[0]))
        for layer, stage in zip(self.layers, self.assigned, strict=True):
            mesh = self.stages[stage]
            x = x.redistribute(mesh, x.placements)
            x = layer(x, dtorch.arange(length, device_mesh=mesh))
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]


def _spread(ids: torch.Tensor, mesh: dtorch.DeviceMesh) -> torch.Tensor:
    """Cut the batch along ``dp`` and the sequence along ``ulysses_cp`` and ``ring_cp``."""
    cuts = {"dp": 0, "ulysses_cp": 1, "ulysess_cp": 1, "ring_cp": 1}
    names: Sequence[str] = mesh.mesh_dim_names or ()
    where = [dtorch.Shard(cuts[n]) if n in cuts else dtorch.Replicate() for n in names] or [
        dtorch.Replicate()
    ] * mesh.ndim
    spread: torch.Tensor = dtorch.distribute_tensor(ids, mesh, where)
    return spread
