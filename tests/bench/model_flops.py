"""Computes the number of floating-point operations in one forward and backward pass of a decoder, and looks up the peak
rate of a device. It does not measure anything.

MFU, model FLOPs utilisation, is the number of operations that a model needs, divided by the number that the device
could have performed in the same time (PaLM, Chowdhery et al. 2022, appendix B): the model needs 6 per token and matrix
weight, and 12 per layer, head dimension and pair of positions. Recomputation is not counted. Two conventions are in use
for causal attention: counting all pairs of positions (PaLM, and most published figures), or only those that the mask
leaves in, which are about half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bfloat16 operations per second from the vendor's data sheets, by part of the device's name."""


def training_flops(
    model: nn.Module, config: Any, lengths: Sequence[int], attention: Literal["whole", "causal"] = "whole"
) -> float:
    """Return the number of operations in a forward and backward pass over sequences of `lengths` tokens, with all
    logits.

    `attention` says which pairs of positions are counted.
    """
    matrices = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    pairs = sum(n * n if attention == "whole" else n * (n + 1) // 2 for n in lengths)
    return 6.0 * matrices * sum(lengths) + 12.0 * config.num_hidden_layers * width * pairs


def peak_flops(device: str) -> float | None:
    """Return the peak operations per second of a device by its name, or None if it is not in the table."""
    return next((value for part, value in PEAKS.items() if part in device), None)
