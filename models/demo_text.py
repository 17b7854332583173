"""A small random language model in real transformers folder format, made offline and the same bytes every time."""

from __future__ import annotations

from pathlib import Path

from .demo import Part, import_class

# Turns as the tokenizer of the demo writes them.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_text_folder(model: str, parts: dict[str, Part], folder: Path) -> None:
    """Write a model of class `model` (an import path) with the configuration of ``parts["model"]`` and a tokenizer.

    The model says whole words and next to no parts of words, bytes or special tokens: the output layer gives those 0,
    and one word or other several units more.
    """
    import torch

    from .demo_tokenizers import text_tokenizer
    from .demo_weights import fill

    tokenizer, first_word = text_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model_class = import_class(model)
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = model_class.config_class(vocab_size=len(tokenizer), **tokens, **parts["model"].config)
    filled = fill(model_class(config), "model")
    with torch.no_grad():
        filled.get_output_embeddings().weight[:first_word] = 0
        filled.get_output_embeddings().weight[first_word:] *= 5
    filled.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
