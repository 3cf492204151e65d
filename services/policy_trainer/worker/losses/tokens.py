"""Holds the data from which every term of the loss is computed: the tokens of one micro-batch that count in the
loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on log-ratios before exp. Beyond float32's range, an unselected branch would make a gradient NaN."""


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True)
class TokenData:
    """The tokens of one micro-batch that count in the loss.

    `shards` holds the shards of tokens that the loss reads, by key (`shared.stages`): each is [M], or [M, width] for a
    key with a width. `advantages` and `weights` are float32 [M]. `sequences` int64 [M] holds the index of each token's
    sequence, below `sequence_count`. A micro-batch contains all tokens of a sequence. With context parallelism, some
    are on other ranks, and `add_up` sums a tensor over these ranks.
    """

    shards: Mapping[str, Tensor]
    advantages: Tensor
    weights: Tensor
    sequences: Tensor
    sequence_count: int
    add_up: Callable[[Tensor], Tensor] = _alone

    @property
    def rollout(self) -> Tensor:
        """The engine's log-probs."""
        return self.shards["rollout_logprobs"]

    @property
    def versions(self) -> Tensor:
        """int32 [M]: the policy versions that sampled the tokens."""
        return self.shards["versions"]

    @property
    def prox(self) -> Tensor | None:
        """The trainer's log-probs at the start of the step, if the anchor needs them."""
        return self.shards.get("prox_logprobs")

    @property
    def ref(self) -> Tensor | None:
        """The reference's log-probs, if the loss has a KL term."""
        return self.shards.get("ref_logprobs")

    @property
    def teacher(self) -> Tensor | None:
        """The teacher's log-probs, if the loss distils."""
        return self.shards.get("teacher_logprobs")

    def at(self, tokens: Tensor, add_up: Callable[[Tensor], Tensor]) -> TokenData:
        """Return the data of the tokens at the positions `tokens`, int64."""
        return TokenData(
            shards={key: values[tokens] for key, values in self.shards.items()},
            advantages=self.advantages[tokens],
            weights=self.weights[tokens],
            sequences=self.sequences[tokens],
            sequence_count=self.sequence_count,
            add_up=add_up,
        )

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


def weighted(data: TokenData, terms: Mapping[str, tuple[float, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of `terms`, each a factor and values [M]: the sum of factor * W * value over terms and tokens, a
    scalar with a gradient.

    Also return the sums that are reported for any per-token loss: 1 (`tokens`), W * loss (`loss`), and W * value under
    the name of each term. Nothing is normalised.
    """
    sums = {name: (data.weights * values).sum() for name, (_, values) in terms.items()}
    loss = reduce(torch.add, (factor * sums[name] for name, (factor, _) in terms.items()))
    return loss, {"tokens": loss.new_full((), float(len(data.weights))), "loss": loss, **sums}


def ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to exp(+-20)."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
