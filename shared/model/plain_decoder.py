"""The forward pass of plain decoders (Llama, Mistral, Qwen2, Qwen3), written out for token-by-token decoding on a CPU.

It launches a third as many operations per token as the model's modules; launching operations dominates the cost of
small batches. On one core of an Intel Xeon (family 6, model 207), the embedded engine decodes 128 tokens of the
quickstart's model 1.5, 1.4 and 1.3 times as fast for 1, 4 and 8 rows, by processor time. The passes read the model's
parameters every time and keep no weights. `is_plain` checks whether they support a model.

Shapes: R rows, T tokens per row, N = R * T, H query heads, G key heads, D head_dim, L keys so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared.model.adapter import AdaptedLinear
from shared.model.linear import OneDnnLinear, linear, product, suits, write_linear
from shared.model.load import passes_of

_CLASSES = frozenset(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
_FIXED_ROPE = frozenset(["default", "linear", "llama3", "yarn"])
"""Kinds of rotary embedding whose angles do not depend on the length of the sequence."""
_LAYERS = frozenset([nn.Linear, OneDnnLinear, AdaptedLinear, nn.Embedding, nn.ModuleList])


def is_plain(model: nn.Module) -> bool:
    """Return whether `PlainDecoder` may compute `model`: its passes allow it, it is a plain decoder, and its precision
    and device are supported."""
    first = next(model.parameters())
    return (
        passes_of(model).decoder == "written-out"
        and is_plain_decoder(model)
        and not isinstance(first, DTensor)  # a DTensor is only one rank's part of the model
        and first.device.type == "cpu"
        and first.dtype in (torch.float32, torch.float64)
    )


def is_plain_decoder(model: nn.Module) -> bool:
    """Return whether `model` is of a class and a configuration that `PlainDecoder` computes, and none of its modules
    was replaced or extended, such as by another library's adapter."""
    config: Any = getattr(model, "config", None)
    if type(model).__name__ not in _CLASSES or not type(model).__module__.startswith("transformers."):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None)
    whole = (
        all(kind == "full_attention" for kind in kinds) if kinds else getattr(config, "sliding_window", None) is None
    )
    return (
        whole
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in _FIXED_ROPE
        and getattr(config, "pretraining_tp", 1) == 1
        and all(_is_own(module, type(model).__module__) for module in model.modules())
    )


def _is_own(module: nn.Module, library: str) -> bool:
    """Return whether `module` computes what its class, defined in the model's `library` module or in torch, computes.

    An adapter in place of a layer may have the layer's attributes, such as `weight`, and still compute something else.
    """
    kind = type(module)
    replaced = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    return not replaced and (kind in _LAYERS or kind.__module__ in (library, "transformers.activations"))


@dataclass
class Past:
    """Keys and values of one layer, [R, G, capacity, D] each, filled up to the current length."""

    keys: Tensor
    values: Tensor


class PlainDecoder:
    """The forward pass of one model. Use it under `torch.inference_mode` or `no_grad`."""

    def __init__(self, model: nn.Module) -> None:
        """`model` must be plain (`is_plain`)."""
        plain: Any = model
        self._model = plain
        config, attention = plain.config, plain.model.layers[0].self_attn
        self._dim = int(attention.head_dim)
        self._heads = int(config.num_attention_heads)
        self._key_heads = int(config.num_key_value_heads)
        self._sizes = [self._heads, self._key_heads, self._key_heads]
        self._scale = float(attention.scaling)

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return the rotary cosines and sines [positions, 1, D], with the first half of the sines negated."""
        x = torch.empty(0)
        cos, sin = self._model.model.rotary_emb(x, torch.arange(positions)[None])
        signed = sin[0].clone()
        signed[:, : self._dim // 2].neg_()
        return cos[0][:, None], signed[:, None]

    def begin(
        self, ids_RT: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, seen_R1TT: Tensor | None
    ) -> tuple[Tensor, list[Past]]:
        """Run whole prompts. Return hidden states [R, T, hidden] before the last norm, and the keys and values.

        `seen_R1TT` bool is true where a token attends; None means a causal mask.
        """
        rows, length = ids_RT.shape
        pasts: list[Past] = []

        def attend(qkv_NXD: Tensor) -> Tensor:
            q, k, v = torch.split(qkv_NXD.view(rows, length, -1, self._dim).transpose(1, 2), self._sizes, dim=1)
            pasts.append(Past(k, v))
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen_R1TT, is_causal=seen_R1TT is None, scale=self._scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(rows * length, -1)

        hidden = self._layers(ids_RT.reshape(-1), cos_N1D, sin_N1D, lambda _, qkv: attend(qkv))
        return hidden.view(rows, length, -1), pasts

    def go_on(
        self, ids_R: Tensor, cos_R1D: Tensor, sin_R1D: Tensor, pasts: list[Past], length: int, bias_X1L: Tensor
    ) -> Tensor:
        """Run one more token per row, append it to `pasts` at `length`, and return hidden states [R, hidden].

        `bias_X1L` with X = R * G or 1 is added to the scores of length + 1 keys: -inf where a row does not attend.
        """
        rows, groups = len(ids_R), self._heads // self._key_heads

        def attend(layer: int, qkv_RXD: Tensor) -> Tensor:
            q, k, v = torch.split(qkv_RXD, self._sizes, dim=1)
            past = pasts[layer]
            past.keys[:, :, length] = k
            past.values[:, :, length] = v
            keys, values = (room.flatten(0, 1)[:, : length + 1] for room in (past.keys, past.values))
            # Queries that share a key head are rows of one product.
            q = q.reshape(rows * self._key_heads, groups, self._dim)
            scores = torch.baddbmm(bias_X1L, q, keys.transpose(1, 2), alpha=self._scale)
            return torch.bmm(scores.softmax(-1), values).view(rows, -1)

        return self._layers(ids_R, cos_R1D, sin_R1D, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocabulary] for hidden states [..., hidden] before the last norm."""
        head, norm = self._model.lm_head, self._model.model.norm
        return _linear(_rms_norm(hidden, norm.weight, norm.variance_epsilon), head)

    def next_logits(self, ids_T: Tensor) -> Tensor:
        """Return the logits [T, vocabulary] of the token that follows each token of a text."""
        cos, sin = self.angles(len(ids_T))
        hidden, _ = self.begin(ids_T[None], cos, sin, None)
        return self.logits(hidden[0])

    def logprobs(self, ids_T: Tensor) -> Tensor:
        """Return the log-prob of every token after the first, given those before it, float32 [T - 1]."""
        return self.next_logits(ids_T[:-1]).log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]

    def _heads_norm(self, attention: Any) -> Tensor | None:
        """Return the weights [H + G, D] of the norms of all query and key heads, or None if the layer has none."""
        if not hasattr(attention, "q_norm"):
            return None
        weights = zip((attention.q_norm.weight, attention.k_norm.weight), self._sizes[:2], strict=True)
        return torch.cat([weight.expand(heads, -1) for weight, heads in weights])

    def _layers(
        self, ids_N: Tensor, cos_N1D: Tensor, sin_N1D: Tensor, attend: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Run all layers and return hidden states. `attend(layer, [N, H + 2G, D])` returns [N, H * D]."""
        model: Any = self._model.model
        x = nn.functional.embedding(ids_N, model.embed_tokens.weight)
        turned = self._heads + self._key_heads
        for number, layer in enumerate(model.layers):
            own, mlp = layer.self_attn, layer.mlp
            normed = _rms_norm(x, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
            qkv = x.new_empty(len(x), (turned + self._key_heads) * self._dim)
            begin = 0
            for part in (own.q_proj, own.k_proj, own.v_proj):
                end = begin + part.out_features
                write_linear(normed, part.weight, part.bias, out=qkv[:, begin:end])
                _add_adapter(qkv[:, begin:end], normed, part)
                begin = end
            qkv = qkv.view(len(x), -1, self._dim)
            qk = qkv[:, :turned]
            weight_XD = self._heads_norm(own)
            if weight_XD is not None:
                qk = _rms_norm(qk, weight_XD, own.q_norm.variance_epsilon)
            torch.addcmul(qk * cos_N1D, qk.roll(self._dim // 2, -1), sin_N1D, out=qkv[:, :turned])
            x = _add_linear(x, attend(number, qkv), own.o_proj)
            normed = _rms_norm(
                x, layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon
            )
            gate = nn.functional.silu(_linear(normed, mlp.gate_proj), inplace=True)
            up = _linear(normed, mlp.up_proj)
            x = _add_linear(x, gate.mul_(up), mlp.down_proj)
        return x


def _add_linear(x: Tensor, y: Tensor, layer: Any) -> Tensor:
    """Return x + layer(y)."""
    if suits(y, layer.weight, layer.bias):
        return _add_adapter(product(y, layer.weight, layer.bias).add_(x), y, layer)
    sum_ = torch.addmm(x, y, layer.weight.t())
    return _add_adapter(sum_ if layer.bias is None else sum_.add_(layer.bias), y, layer)


def _linear(rows: Tensor, layer: Any) -> Tensor:
    """Return layer(rows) for rows [..., in]."""
    return _add_adapter(linear(rows, layer.weight, layer.bias), rows, layer)


def _add_adapter(out: Tensor, rows: Tensor, layer: Any) -> Tensor:
    """Add what the adapter of `layer`, if it has one, makes of rows [..., in] to `out` [..., out], and return it."""
    if isinstance(layer, AdaptedLinear) and layer.applies:
        inner = rows @ layer.lora_A.t()
        if out.dim() == 2:
            return out.addmm_(inner, layer.scaled_B().t())
        out += inner @ layer.scaled_B().t()
    return out


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply RMSNorm over the last dimension (arXiv 1910.07467): x / sqrt(mean(x^2) + epsilon) * weight."""
    mean = torch.add(x.new_tensor(epsilon), torch.linalg.vecdot(x, x), alpha=1.0 / x.shape[-1])
    return (x * mean.rsqrt_()[..., None]).mul_(weight)
