"""Derives from a Hugging Face configuration the architecture that megatron-core must build.

Unknown settings are refused, not guessed, because a model that is almost right trains without an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from shared.ranks.layout import Layout
from shared.rpc.errors import BadInput
from shared.topology.models import Head

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
MIXTURES = ("qwen3_moe", "mixtral")
_ROPE = ("default", "linear", "llama3")
_PAD_TO = 8
"""The padded vocabulary of each tensor-parallel rank is a multiple of this number, which suits matrix units."""


@dataclass(frozen=True)
class Experts:
    """The experts of every layer. A token uses `per_token` of them, whose weights are `normalized` to 1 if that is set,
    and in the model's dtype instead of float32 with `low_weights`. `inner` is the size inside an expert."""

    count: int
    per_token: int
    inner: int
    normalized: bool
    low_weights: bool


@dataclass(frozen=True)
class Architecture:
    """A decoder of one of the families above. Sizes are in elements; `windows` [layers] limit how far back each layer
    attends (None: no limit)."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    key_heads: int
    head_dim: int
    vocab: int
    positions: int
    norm_eps: float
    qkv_bias: bool
    linear_bias: bool
    qk_norm: bool
    tied: bool
    head: Head
    windows: tuple[int | None, ...]
    experts: Experts | None = None

    def padded_vocab(self, tp: int) -> int:
        """Return the number of embedding rows, which `tp` ranks share equally. The last rows may belong to no token."""
        unit = _PAD_TO * tp
        return -(-self.vocab // unit) * unit

    def check(self, layout: Layout) -> None:
        """Raise ValueError if a degree of `layout` does not divide the dimension that it splits."""
        for name, degree, what, count in (
            ("tp", layout.tp, "attention heads", self.heads),
            ("tp", layout.tp, "key-value heads", self.key_heads),
            ("tp", layout.tp, "columns of the feed-forward layer", self.ffn),
            ("pp", layout.pp, "layers", self.layers),
        ):
            if count % degree:
                raise ValueError(f"{name} {degree} does not divide the model's {count} {what}; use a divisor")
        if self.experts is None and layout.ep > 1:
            raise ValueError(f"ep {layout.ep}: the model has no experts; use 1")
        if self.experts is not None and self.experts.count % layout.ep:
            raise ValueError(f"ep {layout.ep} does not divide the model's {self.experts.count} experts; use a divisor")
        if self.experts is not None and layout.tp * layout.cp > 1:
            raise ValueError(f"tp {layout.tp}, cp {layout.cp}: not available for a mixture of experts; use ep and pp")


def read(config: Any, head: Head = "language") -> Architecture:
    """Return the architecture of `config` with this output layer.

    Raises RpcError(bad_request) if this backend cannot reproduce the model.
    """
    kind = str(config.model_type)
    heads = int(config.num_attention_heads)
    bias = bool(getattr(config, "attention_bias", False))
    linear_bias = bool(getattr(config, "mlp_bias", False))
    qkv_bias = bias or kind == "qwen2"
    refused = None
    if kind not in FAMILIES:
        refused = f"model_type {kind!r} (only {', '.join(FAMILIES)})"
    elif config.hidden_act != "silu":
        refused = f"hidden_act {config.hidden_act!r}"
    elif bias != linear_bias:
        refused = f"attention_bias {bias} with mlp_bias {linear_bias}"
    elif config.rope_parameters["rope_type"] not in _ROPE:
        refused = f"rope_type {config.rope_parameters['rope_type']!r}"
    elif getattr(config, "attention_dropout", 0.0):
        refused = f"attention_dropout {config.attention_dropout}"
    elif kind in MIXTURES and (
        getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) > 1
    ):
        refused = "a mixture with layers without experts (mlp_only_layers, decoder_sparse_step)"
    elif kind in MIXTURES and config.sliding_window is not None:
        refused = f"a mixture with sliding_window {config.sliding_window}"
    if refused:
        raise BadInput(f"backend megatron does not support {refused}; use backend torch")
    layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return Architecture(
        layers=layers,
        hidden=int(config.hidden_size),
        ffn=int(config.intermediate_size),
        experts=_experts(config),
        heads=heads,
        key_heads=int(config.num_key_value_heads or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab=int(config.vocab_size),
        positions=int(config.max_position_embeddings),
        norm_eps=float(config.rms_norm_eps),
        qkv_bias=qkv_bias,
        linear_bias=linear_bias,
        qk_norm=kind.startswith("qwen3"),
        tied=bool(config.tie_word_embeddings),
        head=head,
        windows=tuple(int(config.sliding_window) if kind == "sliding_attention" else None for kind in kinds),
    )


def _experts(config: Any) -> Experts | None:
    """Return what the router and the experts of transformers' model do, or None for a dense model."""
    qwen = config.model_type == "qwen3_moe"
    if config.model_type not in MIXTURES:
        return None
    return Experts(
        count=int(config.num_experts if qwen else config.num_local_experts),
        per_token=int(config.num_experts_per_tok),
        inner=int(config.moe_intermediate_size if qwen else config.intermediate_size),
        normalized=bool(config.norm_topk_prob) if qwen else True,
        low_weights=qwen,
    )


def rotary_frequencies(config: Any, architecture: Architecture) -> Tensor:
    """Return the rotary frequencies, float32 [head_dim / 2], in radians per position. They are bit-identical to those
    of the Hugging Face model.
    """
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        even = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float()
        return cast(Tensor, 1.0 / (rope["rope_theta"] ** (even / architecture.head_dim)))
    frequencies, scaling = cast(Any, ROPE_INIT_FUNCTIONS)[rope["rope_type"]](config, torch.device("cpu"))
    if scaling != 1.0:
        raise BadInput(
            f"backend megatron does not support rope attention scaling {scaling}; use backend torch",
        )
    return cast(Tensor, frequencies)
