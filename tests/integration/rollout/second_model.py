"""A tiny, untrained Llama with untied embeddings: a second architecture in addition to the shipped model's."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.unit.tiny_models import make_model

SHIPPED = Path(__file__).resolve().parents[3] / "launch" / "topologies" / "models" / "tiny-qwen3"


def save_llama(folder: Path, *, context_tokens: int = 128) -> Path:
    """Write the model and the shipped 64-token tokenizer into `folder`."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = make_model("llama", tie_word_embeddings=False, **sizes, max_position_embeddings=context_tokens)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(SHIPPED / name, folder / name)
    return folder
