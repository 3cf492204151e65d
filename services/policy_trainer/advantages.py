"""Per-sample advantage estimators: rewards in, advantages out. Never sees a token or a tensor of the model.

Each takes `rewards` float [N] and `groups` int [N] (which task a sample belongs to, counted from 0; only survivors),
`loss_tokens` int [N] where lengths matter, computes in float64 and returns float64 [N]. `Estimator` picks one by name.
An advantage is constant over its sample's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from proto.tensors import Array
from shared.topology.algorithm import Advantage, is_function
from shared.user_function import find_function

WHITEN_EPSILON = 1e-8
"""Added to the variance of a whole batch, as verl's masked_whiten does."""


class Estimator:
    """The advantage estimator of a topology; a user's own function is found once, at the start."""

    def __init__(self, options: Advantage) -> None:
        """Raises ValueError, one line, when a user's own function cannot be used.

        It is called as `fn(rewards, groups, loss_tokens, **params)`, all arrays of [N], and returns [N] numbers.
        """
        self._options = options
        self._function: Callable[..., object] | None = None
        if is_function(options.name):
            self._function = find_function(options.name, "algorithm.advantage.name", 3, options.params)

    def __call__(self, rewards: Array, groups: Array, loss_tokens: Array) -> Array:
        """float32 [N], not always finite: rewards near float32's limit, or a user's own function, see to that.

        Raises ValueError when a user's own function returns something else than N numbers.
        """
        if not len(rewards):
            return np.zeros(0, dtype=np.float32)
        options, values = self._options, rewards.astype(np.float64)
        found: Array
        if self._function is not None:
            found = np.asarray(self._function(values, groups, loss_tokens, **options.params))
            if found.shape != values.shape or found.dtype.kind not in "fiu":
                raise ValueError(
                    f"advantage {options.name} returned {found.dtype} {list(found.shape)}; it must return "
                    f"{len(values)} numbers"
                )
        elif options.name == "grpo":
            found = grpo(values, groups, std_epsilon=options.std_epsilon if options.scale == "std" else None)
        elif options.name == "dr_grpo":
            found = grpo(values, groups, std_epsilon=None)
        elif options.name == "rloo":
            found = rloo(values, groups)
        elif options.name == "opo":
            found = opo(values, groups, loss_tokens)
        elif options.name == "reinforce_pp":
            found = reinforce_pp(values, loss_tokens)
        elif options.name == "reinforce_pp_baseline":
            found = reinforce_pp(grpo(values, groups, std_epsilon=None), loss_tokens)
        else:
            raise ValueError(f"advantage {options.name!r}: no such estimator")
        with np.errstate(over="ignore"):  # whoever asked looks at them
            return found.astype(np.float32)


def grpo(rewards: Array, groups: Array, *, std_epsilon: float | None) -> Array:
    """A = (r - mean of its group) / (std of its group + epsilon); with `std_epsilon` None not divided.

    The standard deviation is the unbiased one over the group's survivors; a group of one gets 0.
    Sources: DeepSeekMath (arXiv 2402.03300), section 4.1.2; undivided: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    counts = np.bincount(groups)
    deviations = rewards - _mean(rewards, groups)[groups]
    if std_epsilon is None:
        return deviations
    squares = np.bincount(groups, weights=deviations**2)
    std = np.sqrt(squares / np.maximum(counts - 1, 1))
    found: Array = deviations / (std + std_epsilon)[groups]
    return found


def rloo(rewards: Array, groups: Array) -> Array:
    """A = r - mean of the *other* samples of its group = G / (G - 1) (r - group mean); a group of one gets 0.

    Source: RLOO (arXiv 2402.14740), the leave-one-out estimator, after Kool et al., "Buy 4 REINFORCE samples, get a
    baseline for free!", 2019.
    """
    counts = np.bincount(groups)
    found: Array = (rewards - _mean(rewards, groups)[groups]) * (counts / np.maximum(counts - 1, 1))[groups]
    return found


def opo(rewards: Array, groups: Array, loss_tokens: Array) -> Array:
    """A = r - b with the length-weighted baseline b = sum(l r) / sum(l) of its group, l = sampled tokens.

    Source: OPO, On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585), its practical (length-weighted) optimal
    baseline. A group without a token gets the plain mean.
    """
    lengths = loss_tokens.astype(np.float64)
    total = np.bincount(groups, weights=lengths)
    weighted = np.bincount(groups, weights=lengths * rewards)
    baseline = np.where(total > 0, weighted / np.maximum(total, 1), _mean(rewards, groups))
    found: Array = rewards - baseline[groups]
    return found


def reinforce_pp(rewards: Array, loss_tokens: Array) -> Array:
    """A = (r - mean) / sqrt(var + 1e-8), both over all sampled tokens of the step, whatever their group.

    A sample counts once a token, the variance is the unbiased one. Given rewards less their group's mean it is the
    variant with a baseline.
    Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation; token-weighted statistics as in verl and
    OpenRLHF. There the reward is the return-to-go less a KL of each token; here a KL in the reward is the sample's sum.
    """
    lengths = loss_tokens.astype(np.float64)
    tokens = lengths.sum()
    if tokens <= 1:
        return np.zeros_like(rewards)
    deviations = rewards - (lengths * rewards).sum() / tokens
    variance = (lengths * deviations**2).sum() / (tokens - 1)
    found: Array = deviations / np.sqrt(variance + WHITEN_EPSILON)
    return found


def _mean(rewards: Array, groups: Array) -> Array:
    means: Array = np.bincount(groups, weights=rewards) / np.maximum(np.bincount(groups), 1)
    return means
