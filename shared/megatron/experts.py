"""The layers of a mixture of experts, in megatron-core's terms: the router, and the experts that a rank holds.

Both compute what the modules of transformers do, with the same operations in the same dtypes, because a token that is
routed differently has another gradient. They hold the same tensors, the experts a part of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from shared.megatron.architecture import Experts


def experts_spec(experts: Experts) -> ModuleSpec:
    """Return the feed-forward layer of a decoder with `experts`."""
    made = MoESubmodules(
        experts=ModuleSpec(module=PackedExperts, params={"experts": experts}),
        router=lambda **given: PackedRouter(experts, **given),
    )
    return ModuleSpec(module=MoELayer, submodules=made)


class PackedRouter(nn.Module):
    """Routes tokens as the routers of transformers do. Every rank has the whole router."""

    def __init__(self, experts: Experts, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        self._experts = experts
        shape = (experts.count, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))

    def set_layer_number(self, layer_number: int) -> None:
        pass

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map `hidden` [N, 1, hidden] to the weights [N, experts] of each token's experts, which are zero for all
        others, and to the chosen experts, bool [N, experts]."""
        logits = F.linear(hidden.flatten(0, 1), self.weight)
        likely = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float))
        chosen, indices = torch.topk(likely, self._experts.per_token, dim=-1)
        if self._experts.normalized:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        if self._experts.low_weights:
            chosen = chosen.to(logits.dtype)
        weights = torch.zeros(logits.shape, dtype=chosen.dtype, device=logits.device).scatter(1, indices, chosen)
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)


class PackedExperts(nn.Module):
    """This rank's experts, in the two tensors that transformers has for all of them."""

    def __init__(self, count: int, config: TransformerConfig, experts: Experts, **_: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, experts.inner
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden, dtype=config.params_dtype))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]  # else no rank has a copy

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Map the `tokens` [T, hidden] of all experts, `counts` of each in turn, to their outputs times `weights` [T].
        Experts without tokens take part, so that every parameter gets a gradient."""
        outputs = []
        sizes = counts.tolist()
        for rows, gate_up, down in zip(torch.split(tokens, sizes), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(rows, gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return (torch.cat(outputs) * weights[:, None]).to(tokens.dtype), None
