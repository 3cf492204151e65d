"""The attention function inside megatron-core's layers: packed sequences, shared prefixes and context parallelism, on
any device. The same code as the torch backend's (`shared.model`), so both see the same masks. Must never reorder
tokens: what it gets are the nodes of a micro-batch, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from shared.model.attention import Trees, attend_trees
from shared.model.context import Cut, attend_cut


class PackedAttention(torch.nn.Module):
    """`core_attention` of a ModuleSpec. megatron-core hands the `attention_mask` through untouched: here it is the
    micro-batch's `Trees` or `Cut`, with one micro-batch's keys never in reach of another's.
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
        """`layer_number` counts from 1 over all pipeline stages; `windows` as in `Architecture`."""
        super().__init__()
        self._scale = softmax_scale if softmax_scale is not None else float(config.kv_channels or 0) ** -0.5
        self._window = windows[layer_number - 1]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Trees | Cut,
        **_: Any,  # what a mask would say; the causal one is in the positions
    ) -> Tensor:
        """`query` [N, 1, H, D], `key`, `value` [N, 1, G, D] -> [N, 1, H * D]."""
        q_1HND, k_1GND, v_1GND = (each.permute(1, 2, 0, 3) for each in (query, key, value))
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
