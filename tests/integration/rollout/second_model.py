"""Models besides the shipped one: a tiny, untrained Llama with untied embeddings, tiny, untrained mixtures of experts,
and the shipped model with a stored copy of its tied head."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from shared.sample import Sample
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


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm4_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""The mixtures that `save_mixture` makes. Their sizes suit vLLM's kernels for CPUs, also on two ranks."""


SHORT = (
    "services.reference=null",
    "reward.function=tests.integration.rollout.second_model:even_tokens",
    "run.steps=4",
    "data.eval={}",
    "algorithm.kl=null",
    "algorithm.tasks_per_step=8",
    "staleness=0",
)
"""Settings of a short run of the quickstart, from which an untrained model learns something."""


def save_mixture(kind: str, folder: Path) -> Path:
    """Write a mixture of experts and the shipped 64-token tokenizer into `folder`."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    make_model(kind, **sizes, **MIXTURES[kind], tie_word_embeddings=False).save_pretrained(folder)
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


def even_tokens(sample: Sample) -> float:
    """Reward the share of even token ids, which an untrained model varies."""
    return sum(token % 2 == 0 for token in sample.token_ids) / max(len(sample.token_ids), 1)
