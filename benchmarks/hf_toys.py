"""Toy models and inputs for any architecture of transformers: what ``hf_sweep.py`` builds and feeds.

Nothing here knows a model by name: sizes go by the names of configuration fields, inputs by those of forward's parameters.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

BATCH, TEXT, FRAMES, SAMPLES = 2, 12, 64, 4000
IMAGE_TOKEN, VIDEO_TOKEN, AUDIO_TOKEN = 5, 6, 7
SEED = 3  # before every run: some models draw in forward
MOST_PARAMETERS = 50_000_000
_LAYERS = dict.fromkeys(
    ["num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layers", "depth", "num_attention_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers", "adaptor_num_hidden_layers"], 2
)  # fmt: skip
_IDS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "image_token_id": IMAGE_TOKEN,
    "image_token_index": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "audio_token_id": AUDIO_TOKEN,
    "audio_token_index": AUDIO_TOKEN, "vision_start_token_id": 8, "vision_end_token_id": 9,
}  # fmt: skip
_SIZES = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim", "emb_dim", "encoder_hidden_size", "hidden_dim", "qformer_hidden_size", "projector_hidden_size", "output_channels", "mask_decoder_hidden_size", "out_hidden_size", "decoder_hidden_size", "fpn_hidden_size", "decoder_output_dim", "image_text_hidden_size", "cross_attention_hidden_size"], 64),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "mlp_dim", "d_inner"], 128),
    **dict.fromkeys(
        ["num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"], 4),
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "d_head": 16, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "vocab_size": 320, "max_position_embeddings": 128, "image_size": 32, "patch_size": 8,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64,
    "vision_feature_layer": -1, "image_embedding_size": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "num_pos_feats": 32,
}  # fmt: skip


def configurations(model_type: str) -> Iterator[Any]:
    """Configurations of an architecture, the smallest first; not all of them make a model that runs.

    Raises:
        NotRunnableError: there is none without arguments.
    """
    from transformers import CONFIG_MAPPING

    for sizes in ({**_LAYERS, **_IDS, **_SIZES}, {**_LAYERS, **_IDS, "vocab_size": 320}, _LAYERS):
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception as e:
            raise NotRunnableError(f"its configuration has no default: {e}") from e
        _shrink(config, sizes)
        yield config


def _shrink(config: Any, sizes: dict[str, int]) -> None:
    # Stages of falling resolution have a width each, which no one number may replace.
    staged = isinstance(getattr(config, "depths", None), (list, tuple))
    for key, value in (_IDS if staged else sizes).items():
        with contextlib.suppress(Exception):  # some fields are computed from others, or differ from layer to layer
            old = getattr(config, key)
            if (isinstance(old, int) and not isinstance(old, bool)) or (old is None and key in _IDS):
                setattr(config, key, value)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = _IDS["decoder_start_token_id"]
    if staged:
        with contextlib.suppress(Exception):
            config.depths = [1] * len(config.depths)
    for key, value in list(vars(config).items()):
        if hasattr(value, "sub_configs"):
            _shrink(value, sizes)
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))  # one layer of each kind
            with contextlib.suppress(Exception):
                setattr(config, key, (kinds * 2)[: max(2, len(kinds))])
                config.num_hidden_layers = len(getattr(config, key))
    if sizes is not _LAYERS and vars(config).get("kv_lora_rank"):  # every head has its own key and value
        with contextlib.suppress(Exception):  # one that differs from layer to layer
            config.num_key_value_heads = config.num_attention_heads
        config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    if hasattr(config, "vision_feature_layers"):
        config.vision_feature_layers = [-1, -2]
    if hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = [[config.vision_config.image_size] * 2]
    rope = getattr(config, "rope_parameters", None)
    if rope and "rope_theta" in rope and hasattr(config, "num_attention_heads"):  # one rotation for time, height and width
        width = int(vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads)
        half = int(width * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


class Inputs:
    """Random inputs for a model, by the names of its forward's parameters.

    Args:
        model: a model of transformers.
        variant: which of the usual layouts of images and sound to use, 0 or 1.
        sizes: whether to give the sizes and masks of images and sound, which only some models want.
    """

    def __init__(self, model: torch.nn.Module, variant: int, sizes: bool) -> None:
        self._model, self._variant, self._sizes = model, variant, sizes
        self._random = torch.Generator().manual_seed(1)
        config: Any = model.config
        names = ("vision_config", "audio_config", "text_config", "encoder_config", "backbone_config", "encoder")
        self._configs = [config, *(c for n in names if hasattr(c := getattr(config, n, None), "to_dict"))]

    def make(self) -> dict[str, Any]:
        """Arguments for forward."""
        parameters = inspect.signature(self._model.forward).parameters
        made: dict[str, Any] = {}
        for name, parameter in parameters.items():
            maker = _ALWAYS.get(name) or (_SIZES_AND_MASKS.get(name) if self._sizes else None)
            if maker is None and parameter.default is parameter.empty:
                maker = _REQUIRED.get(name)
            if maker is not None:
                made[name] = maker(self)
        if "image_grid_thw" in made:
            made["pixel_values"] = self.patches()
        self._mark(made)
        return made

    def size(self, default: int, *names: str) -> int:
        """The first of these fields that the configuration, or a part of it, has."""
        for config in self._configs:
            for name in names:
                value = getattr(config, name, None)
                value = value[0] if isinstance(value, (list, tuple)) and value else value
                if isinstance(value, int):
                    return value
        return default

    def ids(self, length: int = TEXT) -> Tensor:
        """Token numbers."""
        return torch.randint(10, 300, (BATCH, length), generator=self._random)

    def normal(self, *shape: int) -> Tensor:
        """Normal random numbers."""
        return torch.randn(shape, generator=self._random)

    def images(self) -> Tensor:
        """One image, or in the other variant a list of two, for each entry of the batch."""
        side, channels = self.size(64, "image_size", "input_size"), self.size(3, "num_channels", "in_channels")
        frames = (self.size(2, "num_frames", "frames_per_clip"),) if self._variant else ()
        return self.normal(BATCH, *frames, channels, side, side)

    def patches(self) -> Tensor:
        """Four by four patches of each image in rows, as models with images of any size take them."""
        depth = self.size(3, "in_channels", "num_channels", "in_chans") * self.size(1, "temporal_patch_size")
        return self.normal(BATCH * 16, depth * self.size(8, "patch_size") ** 2)

    def spectrum(self) -> Tensor:
        """Mel features: bins by frames, or in the other variant frames by bins."""
        bins = self.size(16, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim")
        frames = 2 * self.size(FRAMES // 2, "max_source_positions") if not self._variant else FRAMES
        return self.normal(BATCH, bins, frames) if not self._variant else self.normal(BATCH, frames, bins)

    def wave(self) -> Tensor:
        """Sound: samples, or in the other variant one channel of samples."""
        return self.normal(BATCH, *((1,) if self._variant else ()), SAMPLES)

    def _mark(self, made: dict[str, Any]) -> None:
        """Put as many placeholder tokens before the text as images and sound have features."""
        if "input_ids" not in made:
            return
        marks = []
        for kind, token, source in (("image", IMAGE_TOKEN, "pixel_values"), ("audio", AUDIO_TOKEN, "input_features")):
            features = getattr(self._model, f"get_{kind}_features", None)
            has_token = hasattr(self._model.config, f"{kind}_token_id") or hasattr(self._model.config, f"{kind}_token_index")
            if features is None or not has_token or source not in made:
                continue
            wanted = inspect.signature(features).parameters
            everything = any(p.kind is p.VAR_POSITIONAL for p in wanted.values())
            given = {k: v for k, v in made.items() if (everything or k in wanted) and "input_ids" not in k}
            rows = sum(t.numel() // t.shape[-1] for t in _feature_tensors(features(**given)))
            rows = BATCH * getattr(self._model.config, "num_query_tokens", rows // BATCH)
            marks.append(torch.full((BATCH, rows // BATCH), token))
        made["input_ids"] = torch.cat([*marks, made["input_ids"]], 1)
        if "mm_token_type_ids" in inspect.signature(self._model.forward).parameters:
            made["mm_token_type_ids"] = (made["input_ids"] == IMAGE_TOKEN).int()


def _feature_tensors(found: Any) -> list[Tensor]:
    found = getattr(found, "pooler_output", None) if hasattr(found, "pooler_output") else found
    return [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor)]


def _ones(*shape: int) -> Callable[[Inputs], Tensor]:
    return lambda inputs: torch.ones(shape, dtype=torch.long)


def _grid(inputs: Inputs) -> Tensor:
    return torch.tensor([[1, 4, 4]] * BATCH)


def _boxes(inputs: Inputs) -> Tensor:
    corner = torch.randint(0, 30, (BATCH, TEXT, 2), generator=inputs._random)
    return torch.cat([corner, corner + 20], -1)


_ALWAYS: dict[str, Callable[[Inputs], Any]] = {
    "input_ids": Inputs.ids,
    "decoder_input_ids": lambda inputs: inputs.ids(7),
    "pixel_values": Inputs.images,
    "input_features": Inputs.spectrum,
    "input_values": Inputs.wave,
    "bbox": _boxes,
    "image_grid_thw": _grid,
    "input_points": lambda inputs: 16 * inputs.normal(BATCH, 1, 2, 2).abs(),
}
_SIZES_AND_MASKS: dict[str, Callable[[Inputs], Any]] = {
    "image_sizes": lambda inputs: torch.tensor([[inputs.size(64, "image_size")] * 2] * BATCH),
    "input_features_mask": lambda inputs: torch.ones(BATCH, inputs.spectrum().shape[2 - inputs._variant], dtype=torch.long),
    "feature_attention_mask": lambda inputs: torch.ones(BATCH, inputs.spectrum().shape[2 - inputs._variant], dtype=torch.long),
}
_REQUIRED: dict[str, Callable[[Inputs], Any]] = {
    "attention_mask": _ones(BATCH, TEXT),
    "pixel_values_videos": Inputs.images,
    "pixel_mask": lambda inputs: torch.ones(BATCH, *inputs.images().shape[-2:], dtype=torch.long),
    "hidden_states": Inputs.patches,
    "grid_thw": _grid,
    "query_embeds": lambda inputs: inputs.normal(BATCH, 4, inputs.size(64, "hidden_size")),
    "audio_codes": lambda inputs: torch.randint(0, 8, (BATCH, inputs.size(4, "num_quantizers", "n_codebooks"), TEXT)),
    "past_values": lambda inputs: inputs.normal(
        BATCH, inputs.size(32, "context_length"), inputs.size(1, "num_input_channels")
    ),
}


def tensors_of(output: Any) -> list[Tensor]:
    """Every tensor of a model's output, in order; caches are left out."""
    if isinstance(output, Tensor):
        return [output]
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    return [t for x in output for t in tensors_of(x)] if isinstance(output, (list, tuple)) else []


class NotRunnableError(Exception):
    """No toy configuration of an architecture runs on plain torch; says what went wrong with each."""


def build(auto: Any, model_type: str) -> tuple[torch.nn.Module, dict[str, Any], list[Tensor]]:
    """A toy model with random weights that runs on plain torch, inputs for it and what it gives.

    Raises:
        NotRunnableError: there is none, or its results are all nan or nothing.
    """
    reasons: list[str] = []
    for config in configurations(model_type):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in auto.from_config(copy.deepcopy(config)).parameters())
            if size > MOST_PARAMETERS:
                reasons.append(f"{size} parameters")
                continue
            torch.manual_seed(0)
            model = auto.from_config(config).eval()
        except Exception as e:
            reasons.append(f"{type(e).__name__} {e}")
            continue
        for sizes, variant in itertools.product((False, True), (0, 1)):
            try:
                inputs = Inputs(model, variant, sizes).make()
                torch.manual_seed(SEED)
                want = tensors_of(copy.deepcopy(model)(**inputs))  # some models keep what they have computed
            except Exception as e:
                reasons.append(f"{type(e).__name__} {e}")
                continue
            if any(t.is_floating_point() and t.numel() and not t.isnan().any() for t in want):
                return model, inputs, want
            reasons.append("nothing but nan")
    raise NotRunnableError("; ".join(dict.fromkeys(r.replace("\n", " ")[:100] for r in reasons)))
