"""Model folders of the quickstart's architecture, in any size, with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.utils import logging

from tests.bench.cluster_run import MODEL

SEED = 5
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def save_random(folder: Path, **sizes: int) -> None:
    """Save a model of the quickstart's architecture with random float32 weights."""
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(MODEL)
    for name, size in sizes.items():
        setattr(config, name, size)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder / name)


def save_random_of(folder: Path, mib: int) -> None:
    """Save a model with about `mib` MiB of weights; the number of layers is chosen accordingly."""
    width = 1024 if mib > 256 else 512
    layer_mib = (2 * width * 16 * 64 + 2 * width * 4 * 64 + 3 * width * 4 * width) * 4 / 2**20
    save_random(
        folder,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_hidden_layers=max(round(mib / layer_mib), 1),
    )


QWEN2_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
"""The sizes of Qwen2-1.5B that differ from those of Qwen2-0.5B."""


def save_random_qwen2(folder: Path, **sizes: int) -> None:
    """Save a model with the shape of Qwen2-0.5B, except for `sizes`, with random bfloat16 weights and a context of 512
    tokens."""
    torch.manual_seed(SEED)
    logging.disable_progress_bar()
    half_b = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    config = Qwen2Config(
        vocab_size=151936,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        **{**half_b, **sizes},
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder / name)
