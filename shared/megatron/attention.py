"""The attention function of megatron-core layers, for packed sequences, shared prefixes and context parallelism.

It runs on any device and shares its code with the torch backend (`shared.model`), so that both see the same masks. It
preserves the order of tokens: its input is the sequence of a micro-batch's nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from shared.model.attention import Trees, attend_trees
from shared.model.context import Cut, attend_cut


class PackedAttention(torch.nn.Module):
    """`core_attention` of a ModuleSpec. megatron-core passes `attention_mask` through unchanged. Here it is the `Trees`
    or `Cut` of the micro-batch, whose tokens attend only to one another.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        windows: tuple[int | None, ...] = (),
        softmax_scale: float | None = None,
        **_: Any,  # communication settings of other kernels
    ) -> None:
        """`layer_number` counts from 1 across all pipeline stages; `windows` is `Architecture.windows`."""
        super().__init__()
        self._scale = softmax_scale if softmax_scale is not None else float(config.kv_channels or 0) ** -0.5
        self._window = windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Trees | Cut,
        **_: Any,  # mask settings, which are redundant: the positions define the causal mask
    ) -> Tensor:
        """Map `query` [N, 1, H, D] and `key`, `value` [N, 1, G, D] to [N, 1, H * D]."""
        q_1HND, k_1GND, v_1GND = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if isinstance(attention_mask, Cut):
            out_1NHD, _none = attend_cut(
                self, q_1HND, k_1GND, v_1GND, None, cut=attention_mask, scaling=self._scale, sliding_window=self._window
            )
        else:
            out_1NHD, _none = attend_trees(
                self,
                q_1HND,
                k_1GND,
                v_1GND,
                None,
                trees=attention_mask,
                scaling=self._scale,
                sliding_window=self._window,
            )
        return out_1NHD.transpose(0, 1).flatten(2)
