"""What every term of the loss is computed from: the masked-in tokens of one micro-batch. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut at +-20 before exp: past float32's range an unselected branch would turn a gradient into NaN."""


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True)
class TokenData:
    """Masked-in tokens of one micro-batch, each [M] float32 (`versions` int32); `prox`, `ref` if the loss uses them.

    `sequences` int64 [M]: which of `sequence_count` sequences a token belongs to; all tokens of a sequence are in the
    micro-batch, except those that other ranks hold: `add_up` sums a tensor over these ranks (context parallelism).
    """

    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    prox: Tensor | None
    ref: Tensor | None
    sequences: Tensor
    sequence_count: int
    add_up: Callable[[Tensor], Tensor] = _alone

    @torch.no_grad()
    def sequence_sum(self, values: Tensor) -> Tensor:
        """[M]: for each token the sum of `values` [M] over its whole sequence; without a gradient."""
        return self._sums(values.detach())[self.sequences]

    @torch.no_grad()
    def sequence_mean(self, values: Tensor) -> Tensor:
        """[M]: likewise the mean over the sequence's masked-in tokens."""
        sums, counts = self._sums(values.detach()), self._sums(torch.ones_like(values))
        return (sums / counts.clamp(min=1.0))[self.sequences]

    def _sums(self, values: Tensor) -> Tensor:
        return self.add_up(values.new_zeros(self.sequence_count).index_add(0, self.sequences, values))


def ratio(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), cut at exp(+-20)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
