"""Converts weights between Hugging Face and megatron-core names, whole or split across tp, pp and ep.

This is pure arithmetic on tensors, without process groups or files. Every rule has an exact inverse, so the converter
works for weights, gradients and optimizer moments alike. With H heads and G key-value heads of D elements, megatron
keeps the queries of a group next to its key and value: rows [G, (H/G + 2) * D]; each tensor-parallel rank holds whole
groups. Padding rows of the vocabulary are zero and are dropped on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from shared.megatron.architecture import Architecture
from shared.model import value_head

Rule = Literal["whole", "rows", "columns", "qkv", "gate_up", "vocab", "experts"]
"""Layout of the full tensor on tensor-parallel ranks: whole on each rank, cut along dimension 0 or 1, or as described
above. Experts are cut along dimension 0 and are on expert-parallel ranks."""


@dataclass(frozen=True)
class Weight:
    """One parameter of megatron-core. `name` is its name on pipeline stage `stage`; `parts` are the Hugging Face
    tensors that it consists of, with the full `shapes`."""

    stage: int
    name: str
    rule: Rule
    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class Converter:
    """The table of all weights of a model under `tp`, `pp` and `ep`, in the order of the Hugging Face model."""

    def __init__(self, model: Architecture, tp: int, pp: int, ep: int = 1) -> None:
        self._model = model
        self._tp = tp
        self._ep = ep
        per_stage = model.layers // pp
        embedding = ("model.embed_tokens.weight",)
        table = (model.vocab, model.hidden)
        self.weights = [Weight(0, "embedding.word_embeddings.weight", "vocab", embedding, (table,))]
        for layer in range(model.layers):
            self.weights += self._layer(layer // per_stage, layer % per_stage, f"model.layers.{layer}")
        last = pp - 1
        self.weights.append(
            Weight(last, "decoder.final_layernorm.weight", "whole", ("model.norm.weight",), ((model.hidden,),))
        )
        self.copies: list[Weight] = []
        """Second copies of weights on another stage, which are written when weights are loaded and are never read
        back."""
        if model.head == "value":
            self.weights.append(
                Weight(last, "output_layer.weight", "whole", (value_head.WEIGHT,), ((1, model.hidden),))
            )
        elif not model.tied:
            self.weights.append(Weight(last, "output_layer.weight", "vocab", ("lm_head.weight",), (table,)))
        elif pp > 1:
            self.copies.append(Weight(last, "output_layer.weight", "vocab", embedding, (table,)))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every Hugging Face tensor. A tied tensor is included once."""
        return {part: shape for weight in self.weights for part, shape in zip(weight.parts, weight.shapes, strict=True)}

    @property
    def elements(self) -> int:
        """Return the number of parameters of the whole model."""
        return sum(prod(shape) for shape in self.shapes.values())

    def _layer(self, stage: int, local: int, source: str) -> list[Weight]:
        model = self._model
        hidden, ffn, dim = model.hidden, model.ffn, model.head_dim
        queries, keys = model.heads * dim, model.key_heads * dim
        target = f"decoder.layers.{local}"
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")

        def one(name: str, rule: Rule, part: str, *shape: int) -> Weight:
            return Weight(stage, f"{target}.{name}", rule, (part,), (shape,))

        def several(name: str, rule: Rule, parts: Sequence[str], rows: Sequence[int], *rest: int) -> Weight:
            return Weight(stage, f"{target}.{name}", rule, tuple(parts), tuple((first, *rest) for first in rows))

        def ends(parts: Sequence[str], end: str) -> list[str]:
            return [f"{part}.{end}" for part in parts]

        rows = (queries, keys, keys)
        weights = [
            one("input_layernorm.weight", "whole", f"{source}.input_layernorm.weight", hidden),
            several("self_attention.linear_qkv.weight", "qkv", ends(qkv, "weight"), rows, hidden),
            one("self_attention.linear_proj.weight", "columns", f"{attention}.o_proj.weight", hidden, queries),
            one("pre_mlp_layernorm.weight", "whole", f"{source}.post_attention_layernorm.weight", hidden),
            several("mlp.linear_fc1.weight", "gate_up", ends(gate_up, "weight"), (ffn, ffn), hidden),
            one("mlp.linear_fc2.weight", "columns", f"{mlp}.down_proj.weight", hidden, ffn),
        ]
        if model.experts is not None:
            count, inner = model.experts.count, model.experts.inner
            weights[-2:] = [
                one("mlp.router.weight", "whole", f"{mlp}.gate.weight", count, hidden),
                one("mlp.experts.gate_up_proj", "experts", f"{mlp}.experts.gate_up_proj", count, 2 * inner, hidden),
                one("mlp.experts.down_proj", "experts", f"{mlp}.experts.down_proj", count, hidden, inner),
            ]
        if model.qkv_bias:
            weights.append(several("self_attention.linear_qkv.bias", "qkv", ends(qkv, "bias"), rows))
        if model.linear_bias:
            weights += [
                one("self_attention.linear_proj.bias", "whole", f"{attention}.o_proj.bias", hidden),
                several("mlp.linear_fc1.bias", "gate_up", ends(gate_up, "bias"), (ffn, ffn)),
                one("mlp.linear_fc2.bias", "whole", f"{mlp}.down_proj.bias", hidden),
            ]
        if model.qk_norm:
            weights += [
                one("self_attention.q_layernorm.weight", "whole", f"{attention}.q_norm.weight", dim),
                one("self_attention.k_layernorm.weight", "whole", f"{attention}.k_norm.weight", dim),
            ]
        return weights

    # ---- one weight

    def split(self, weight: Weight, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the shards of the full `parts`, one for each rank that has another part."""
        tp, rule = self._tp, weight.rule
        if rule == "whole":
            return [parts[0]] * tp
        if rule == "columns":
            return list(parts[0].chunk(tp, 1))
        if rule == "vocab":
            padding = parts[0].new_zeros(self._model.padded_vocab(tp) - self._model.vocab, *parts[0].shape[1:])
            return list(torch.cat([parts[0], padding]).chunk(tp))
        if rule == "qkv":
            grouped = [part.view(self._model.key_heads, -1, *part.shape[1:]) for part in parts]
            return [piece.flatten(0, 1) for piece in torch.cat(grouped, 1).chunk(tp)]
        if rule == "gate_up":
            return [torch.cat(pair) for pair in zip(*(part.chunk(tp) for part in parts), strict=True)]
        return list(parts[0].chunk(self._ep if rule == "experts" else tp))

    def join(self, weight: Weight, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the full parts from the shards of all ranks that share them: the exact inverse of `split`."""
        rule = weight.rule
        if rule == "whole":
            return [shards[0]]
        if rule == "columns":
            return [torch.cat(list(shards), 1)]
        if rule == "vocab":
            # cut first: a slice of the whole would keep the padding's memory alive
            rows = len(shards[0])
            return [torch.cat([shard[: max(0, self._model.vocab - at * rows)] for at, shard in enumerate(shards)])]
        if rule == "qkv":
            model = self._model
            sizes = [model.heads // model.key_heads * model.head_dim, model.head_dim, model.head_dim]
            whole = torch.cat([shard.view(-1, sum(sizes), *shard.shape[1:]) for shard in shards])
            return [part.flatten(0, 1) for part in torch.split(whole, sizes, 1)]
        if rule == "gate_up":
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat([half[index] for half in halves]) for index in range(2)]
        return [torch.cat(list(shards))]
