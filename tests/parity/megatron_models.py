"""Provides tiny models of the families that the megatron backend supports, saved as folders, and backends for them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from proto.tensors import Array
from services.policy_trainer.worker.backend import BackendOptions, Sequences
from services.policy_trainer.worker.backend_torch import TorchBackend
from services.policy_trainer.worker.megatron.backend import MegatronBackend
from shared.model.load import named_weights
from shared.ranks.layout import RankPlace
from shared.topology.models import Head
from shared.topology.services import Recompute
from tests.unit.tiny_models import make_model

VOCAB = 61
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"kind": "qwen3", "head_dim": 12, "tie_word_embeddings": True, "vocab_size": VOCAB},
    "qwen2-bias": {"kind": "qwen2", "tie_word_embeddings": True, "vocab_size": VOCAB},
    "llama-untied": {"kind": "llama", "tie_word_embeddings": False, "vocab_size": VOCAB},
}
_EXPERTS = {"vocab_size": VOCAB, "num_experts_per_tok": 2, "tie_word_embeddings": False}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"kind": "qwen3_moe", "head_dim": 12, "num_experts": 6, "moe_intermediate_size": 20, **_EXPERTS},
    "mixtral": {"kind": "mixtral", "num_local_experts": 4, **_EXPERTS},
}


CRITICS = {"qwen3-critic": {**FAMILIES["qwen3-tied"], "head": "value"}}
"""Value models."""


def head_of(family: str) -> Head:
    return "value" if family in CRITICS else "language"


class ExactRouter(torch.nn.Module):
    """A router in the dtype of its input. The library's version always computes probabilities in float32."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight, self.top_k = original.weight, original.top_k
        self._normalized = getattr(original, "norm_topk_prob", True)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        chosen, indices = logits.softmax(-1).topk(self.top_k)
        return logits, chosen / chosen.sum(-1, keepdim=True) if self._normalized else chosen, indices


def hf_model(family: str, dtype: str = "float32") -> Any:
    """Return the model of `family`, which always has the same weights. Its biases are not zero."""
    model = make_model(**(FAMILIES | MIXTURES | CRITICS)[family], dtype=getattr(torch, dtype))
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # the default refuses float64
        for layer in model.model.layers if dtype == "float64" else ():
            layer.mlp.gate = ExactRouter(layer.mlp.gate)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("bias"):
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float32) * 0.2)
    return model


def save(family: str, folder: Path, dtype: str = "float32") -> Path:
    """Save the model with exactly the weights of `hf_model`, and return its folder."""
    target = folder / f"{family}-{dtype}"
    target.mkdir(parents=True, exist_ok=True)
    model = hf_model(family, dtype)
    (target / "config.json").write_text(json.dumps(model.config.to_dict()))
    weights = {name: each.contiguous() for name, each in named_weights(model).items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def options(
    scratch: Path, max_tokens: int = 4096, recompute: Recompute = "none", head: Head = "language"
) -> BackendOptions:
    own = scratch / f"of-{os.getpid()}"  # every rank is a process
    return BackendOptions(max_tokens, threads=1, device="cpu", scratch=own, recompute=recompute, head=head)


def megatron(
    model: Path, place: RankPlace, *, dtype: str = "float32", max_tokens: int = 4096, recompute: Recompute = "none"
) -> MegatronBackend:
    """Return the backend for a folder of `save`."""
    head = head_of(model.name.rpartition("-")[0])
    return MegatronBackend(model, dtype, options(model / "scratch", max_tokens, recompute, head), place)


def alone(family: str, folder: Path, place: RankPlace, *, dtype: str = "float32") -> TorchBackend:
    """Return the torch backend of one process with the same weights."""
    own = options(folder / "scratch", head=head_of(family))
    return TorchBackend(folder, dtype, own, place, load=lambda _, name, head: hf_model(family, name))


def prefixes(seed: int = 3) -> list[Array]:
    """Return token ids of prefixes of several lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, size=size) for size in (1, 5, 14)]


def every_next_token() -> Sequences:
    """Return sequences for the whole next-token distribution after `prefixes`, in the order of the vocabulary."""
    rows = [np.append(prefix, token) for prefix in prefixes() for token in range(VOCAB)]
    mask = [np.eye(1, len(row), len(row) - 1, dtype=np.uint8)[0] for row in rows]
    lengths = np.array([len(row) for row in rows], np.int32)
    return Sequences(np.concatenate(rows).astype(np.int32), lengths, np.concatenate(mask))


@torch.no_grad()
def plain_distributions(model: Any, temperature: float) -> Array:
    """Return the log-probs [prefixes * VOCAB] of the Hugging Face model's own forward pass."""
    rows = [model(input_ids=torch.from_numpy(each)[None], use_cache=False).logits[0, -1] for each in prefixes()]
    found: Array = torch.cat([(row / temperature).log_softmax(-1) for row in rows]).numpy()
    return found


@torch.no_grad()
def plain_values(classifier: Any) -> Array:
    """Return the values [prefixes * VOCAB] of the states after `prefixes`, from the classifier's own forward pass."""
    rows = [classifier(input_ids=torch.from_numpy(each)[None], use_cache=False).logits[0, 0] for each in prefixes()]
    return np.repeat(torch.stack(rows).numpy(), VOCAB)
