"""The demo of Llama: its real architecture at toy size."""

from __future__ import annotations

from .demo import Part

DEMO_PARTS: dict[str, Part] = {
    "model": Part(
        "transformers.LlamaForCausalLM",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
        },
    ),
}
