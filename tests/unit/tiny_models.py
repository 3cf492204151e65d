"""Provides small randomly initialised models of several architectures, and a plain function that scores sequences one
by one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proto.tensors import Array
from shared.model.load import allow
from shared.model.proof import Exact
from shared.model.value_head import replace_output_layer
from shared.topology.models import Head
from shared.topology.passes import FASTEST, Passes

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class ExactRMSNorm(torch.nn.Module):
    """RMSNorm in the dtype of its input. The library's version always computes in float32, which hides errors below
    1e-7."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.weight = original.weight
        self.variance_epsilon = getattr(original, "variance_epsilon", getattr(original, "eps", 1e-6))
        self.shift = 1.0 if "Gemma" in type(original).__name__ else 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.shift) * hidden * scale


@functools.cache
def exact(router: type) -> type:
    """Return the class of routers that compute in float64. The library's compute their probabilities in float32."""

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        with Exact():
            return router.forward(self, hidden)  # type: ignore[attr-defined]

    return type(router.__name__, (router,), {"forward": forward})


def make_model(
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    passes: Passes = FASTEST,
    head: Head = "language",
    **options: Any,
) -> Any:
    """Return a model of `kind` with weights large enough that its predictions differ, scored with `passes`. The weight
    of a value head is not zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
        if head == "value":
            replace_output_layer(model).weight.normal_(0.0, 0.2)
    model = model.to(dtype).eval()
    if dtype == torch.float64:
        norms = [name for name, each in model.named_modules() if type(each).__name__.endswith("RMSNorm")]
        for name in norms:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, ExactRMSNorm(model.get_submodule(name)))
        for router in [each for each in model.modules() if type(each).__name__.lower().endswith("topkrouter")]:
            router.__class__ = exact(type(router))
    allow(model, passes)
    return model


def ragged(seed: int = 0, tasks: int = 5, group: int = 4) -> tuple[Array, Array, Array]:
    """Return groups of sequences with a common prompt, in which some answers are equal and some share a prefix."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    lengths: list[int] = []
    mask: list[int] = []
    for _ in range(tasks):
        prompt = rng.integers(3, 60, size=rng.integers(1, 7)).tolist()
        for _ in range(group):
            answer = rng.integers(3, 5, size=rng.integers(1, 6)).tolist()
            ids += prompt + answer
            lengths.append(len(prompt) + len(answer))
            mask += [0] * len(prompt) + [1] * len(answer)
    return np.array(ids, np.int32), np.array(lengths, np.int32), np.array(mask, np.uint8)


def plain_logprobs(model: Any, ids: Array, lengths: Array, mask: Array, temperature: float) -> torch.Tensor:
    """Return log-probs [T], scored one sequence at a time by the model's own forward pass."""
    parts: list[torch.Tensor] = []
    start = 0
    for length in lengths.tolist():
        row = torch.from_numpy(ids[start : start + length].astype(np.int64))
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        logprobs = (logits / temperature).log_softmax(-1)
        parts += [logprobs.new_zeros(1), logprobs.gather(1, row[1:, None])[:, 0]]
        start += length
    return torch.cat(parts) * torch.from_numpy(mask).to(parts[0].dtype)


def plain_values(model: Any, ids: Array, lengths: Array, mask: Array) -> torch.Tensor:
    """Return the values [T] of a value model where the mask is 1, computed one sequence at a time by the base model's
    own forward pass. The value of a token is that of the state before it."""
    parts: list[torch.Tensor] = []
    start = 0
    for length in lengths.tolist():
        row = torch.from_numpy(ids[start : start + length].astype(np.int64))
        hidden = model.model(input_ids=row[None], use_cache=False).last_hidden_state[0, :-1]
        parts += [hidden.new_zeros(1), hidden @ model.score.weight[0]]
        start += length
    return torch.cat(parts) * torch.from_numpy(mask).to(parts[0].dtype)


def with_ends(ids: Array, lengths: Array, mask: Array) -> tuple[Array, Array, Array]:
    """Return the sequences with one more token each, which is scored. Its value is the one after the last token."""
    ends = np.cumsum(lengths)
    return np.insert(ids, ends, 7), lengths + np.array(1, lengths.dtype), np.insert(mask, ends, 1)
