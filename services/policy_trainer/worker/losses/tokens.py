"""Holds the data from which every term of the loss is computed: the tokens of one micro-batch that count in the
loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before exp. Beyond float32's range, an unselected branch would make a gradient NaN."""


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True)
class TokenData:
    """The tokens of one micro-batch that count in the loss. Each tensor is [M] float32 (`versions` int32). `prox` and
    `ref` are set if needed.

    `sequences` int64 [M] holds the index of each token's sequence, below `sequence_count`. A micro-batch contains all
    tokens of a sequence. With context parallelism, some are on other ranks, and `add_up` sums a tensor over these
    ranks.
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
        """Return [M] without a gradient: for each token, the sum of `values` [M] over its whole sequence."""
        return self._sums(values.detach())[self.sequences]

    @torch.no_grad()
    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return [M] without a gradient: for each token, the mean over the tokens of its sequence that count in
        the loss."""
        sums, counts = self._sums(values.detach()), self._sums(torch.ones_like(values))
        return (sums / counts.clamp(min=1.0))[self.sequences]

    def _sums(self, values: Tensor) -> Tensor:
        return self.add_up(values.new_zeros(self.sequence_count).index_add(0, self.sequences, values))


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to exp(+-20)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
