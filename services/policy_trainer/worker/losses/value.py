"""The loss of a critic, which learns the returns of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None) -> Tensor:
    """Return 1/2 max((V - R)^2, (clip(V, V0 - c, V0 + c) - R)^2) for each token, [M].

    `values` V [M] have a gradient, `returns` R [M] are the targets, and `old_values` V0 [M] are the values at the start
    of the step. With `clip` None, it is 1/2 (V - R)^2.
    Source: the clipped value loss of OpenAI Baselines (ppo2), as described by Engstrom et al., "Implementation Matters
    in Deep Policy Gradients" (arXiv 2005.12729), section 3.
    """
    squares = (values - returns).square()
    if clip is not None:
        squares = torch.maximum(squares, (values.clamp(old_values - clip, old_values + clip) - returns).square())
    return 0.5 * squares
