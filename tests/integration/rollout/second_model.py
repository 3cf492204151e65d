"""Models besides the shipped one: a tiny, untrained Llama with untied embeddings, and the shipped model with a stored
copy of its tied head."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

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


def save_with_head(folder: Path) -> Path:
    """Write the shipped model with a redundant copy of its tied output head into `folder`, as merging tools do."""
    shutil.copytree(SHIPPED, folder)
    weights = load_file(folder / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
