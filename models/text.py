"""Continuing text with an unmodified causal language model of transformers, on whatever device it stands."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from .errors import ModelInputError
from .folder import check_text_folder


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """How to continue.

    Attributes:
        max_new_tokens: at most so many tokens.
        temperature: 0 takes the likeliest token each time; above, tokens are drawn, the more freely the higher.
        top_k: draw among so many of the likeliest tokens; None: among all.
        top_p: draw among the likeliest tokens that together have this probability; None: among all.
        seed: of the draw.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Continuation:
    """What the model said.

    Attributes:
        tokens: numbers of the new tokens.
        text: the same as text, without special tokens.
        first_s, total_s: seconds until the first token was here, and until all were.
    """

    tokens: list[int]
    text: str
    first_s: float
    total_s: float


def load_text_model(folder: Path, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer in `folder`, the model on the CPU with weights of type `dtype`, for evaluation.

    Reads safetensors files only, never the network, and runs no code of the folder.

    Raises:
        ModelInputError: the folder is not whole, or transformers refuses it.
    """
    check_text_folder(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # libraries raise many kinds here; all mean that the folder cannot be used
        raise ModelInputError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    return model.eval(), tokenizer


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token numbers of a prompt, (1, tokens), int64.

    Raises:
        ModelInputError: it has none.
    """
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"].to(torch.int64)
    if ids.shape[1] == 0:
        raise ModelInputError("the prompt is empty, and the tokenizer adds nothing to it; write something.")
    return ids


def encode_chat(tokenizer: Any, turns: list[dict[str, str]]) -> torch.Tensor:
    """Token numbers of a conversation up to where the model's turn begins, (1, tokens), int64.

    Args:
        turns: each with "role" ("system", "user" or "assistant") and "content".

    Raises:
        ModelInputError: the tokenizer does not know how turns are written, or refuses these.
    """
    if not tokenizer.chat_template:
        raise ModelInputError("the model's tokenizer has no chat template; leave out --chat and give a --prompt.")
    try:
        encoded = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # templates are programs of the model's makers
        raise ModelInputError(f"the model's chat template refuses the conversation: {error}") from error
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def room(model: Any, num_tokens: int) -> int | None:
    """How many tokens the model can add to so many; None where its configuration sets no limit.

    Raises:
        ModelInputError: not one.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        return None
    if num_tokens >= limit:
        raise ModelInputError(
            f"the prompt has {num_tokens} tokens, and the model takes fewer than {limit}; shorten it."
        )
    return int(limit) - num_tokens


def continue_text(
    model: Any, tokenizer: Any, ids: torch.Tensor, request: TextRequest, on_text: Callable[[str], None] | None = None
) -> Continuation:
    """Let the model continue where it stands. Blocks until it has ended.

    Args:
        ids: (1, tokens), on the CPU.
        on_text: called with each further piece of text, as soon as it is whole words or characters.
    """
    streamer = _Streamer(tokenizer, on_text or (lambda piece: None))
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if request.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": request.temperature,
            "top_k": request.top_k or 0,  # None would stand for the library's own 50
            "top_p": 1.0 if request.top_p is None else request.top_p,
        }
    torch.manual_seed(request.seed)
    start = time.perf_counter()
    ids = ids.to(model.device)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            streamer=streamer,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
    total = time.perf_counter() - start
    text: str = tokenizer.decode(streamer.tokens, skip_special_tokens=True)
    return Continuation(streamer.tokens, text, streamer.first_at - start, total)


class _Streamer(TextStreamer):
    """Collects the tokens, and hands on the text that they make.

    Attributes:
        tokens: those after the prompt.
        first_at: when the first of them was here, in seconds of `time.perf_counter`.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text
        self.tokens: list[int] = []
        self.first_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        """Called by transformers with the prompt, and then with each token."""
        if not self.next_tokens_are_prompt:
            self.first_at = self.first_at or time.perf_counter()
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by transformers with each piece of text."""
        self._on_text(text)
