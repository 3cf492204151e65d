"""Floating point operations of one forward and backward pass of a decoder, and what a device can do; no measurement.

MFU, model FLOPs utilisation, is what a model needs over what the device could have done meanwhile (PaLM, Chowdhery
et al. 2022, appendix B): 6 operations a token and matrix weight, 12 a layer, head dimension and pair of positions.
Causal attention counts whole, recomputation not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Dense bfloat16 operations a second by part of the device's name, as the vendor's data sheets give them."""


def training_flops(model: nn.Module, config: Any, lengths: Sequence[int]) -> float:
    """Of one forward and backward pass over sequences of `lengths` tokens; every token's logits are computed."""
    matrices = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    pairs = sum(length * length for length in lengths)
    return 6.0 * matrices * sum(lengths) + 12.0 * config.num_hidden_layers * width * pairs


def peak_flops(device: str) -> float | None:
    """What a device of this name does at most in a second; None when it is not in the table."""
    return next((value for part, value in PEAKS.items() if part in device), None)
