"""Turns the rewards of a step into advantages: shapes the rewards, then applies an estimator. Both are computed per
sample, without tokens or model tensors.

Rewards are normalised over the step, then reduced by the overlong penalty, then by the KL to the reference.

Each estimator takes `rewards` float [N], `groups` int [N] (the index of each sample's task, counted from 0 over the
surviving tasks) and, where lengths matter, `loss_tokens` int [N]. It computes in float64 and returns float64 [N].
`Estimator` selects one by name. All tokens of a sample share its advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from proto.tensors import Array
from shared.rpc.errors import BadInput
from shared.topology import Topology
from shared.topology.algorithm import Advantage, is_function
from shared.user_function import find_function

NORMALISE_EPSILON = 1e-8
KL_SCALAR = "kl"
"""Name of the per-sample scalar that the reference provides when the KL is part of the reward."""
WHITEN_EPSILON = 1e-8
"""Constant added to the variance over a batch, as in verl's masked_whiten."""


def shaped(topology: Topology, scalars: Mapping[str, Array]) -> Array:
    """Return the shaped rewards, float64 [N].

    They are computed from the batch scalars `reward` and `length`, and from `kl` if the KL is part of the reward of
    whole samples. With advantages per token, it is part of the rewards of tokens. Raises ValueError if `kl` is needed
    but missing.
    """
    algorithm, kl = topology.algorithm, topology.algorithm.reward_kl
    rewards = scalars["reward"].astype(np.float64)
    if algorithm.normalise_rewards == "batch":
        rewards = normalised(rewards)
    if algorithm.overlong_penalty is not None:
        limit, penalty = topology.sampling.max_new_tokens, algorithm.overlong_penalty
        rewards = rewards + penalty.factor * overlong_penalty(scalars["length"], limit, penalty.tokens)
    if kl is not None and not algorithm.advantage.per_token:
        if KL_SCALAR not in scalars:
            raise ValueError("the batch has no per-sample KL, but algorithm.kl.in is reward: the reference sent none")
        rewards = rewards - kl.coef * scalars[KL_SCALAR].astype(np.float64)
    return rewards


def turn_scale(topology: Topology, rewards: Array) -> float:
    """Return the factor for the rewards of turns: 1, or that by which `shaped` has normalised the `rewards` [N]."""
    if topology.algorithm.normalise_rewards == "batch" and len(rewards):
        return 1.0 / _deviation(rewards.astype(np.float64))
    return 1.0


def normalised(rewards: Array) -> Array:
    """Return (r - mean) / (std + 1e-8) over all samples of the step; equal rewards become 0.

    The statistics cover one step, because a running mean would be state that a restarted driver would have to recover.
    """
    normalised: Array = (rewards - rewards.mean()) / _deviation(rewards) if len(rewards) else rewards
    return normalised


def _deviation(rewards: Array) -> float:
    return float(rewards.std()) + NORMALISE_EPSILON


def overlong_penalty(lengths: Array, max_new_tokens: int, tokens: int) -> Array:
    """Return penalties, float64 [N]: 0 up to length `max_new_tokens - tokens`, then linear to -1 at `max_new_tokens`.

    Source: soft overlong punishment of DAPO (arXiv 2503.14476), equation 13, with L_max = max_new_tokens and
    L_cache = `tokens`.
    """
    over = lengths.astype(np.float64) - (max_new_tokens - tokens)
    penalties: Array = -np.clip(over / tokens, 0.0, 1.0)
    return penalties


class Estimator:
    """The advantage estimator that a topology specifies. A user-defined function is imported once, by the
    constructor. If each token has an advantage of its own, workers compute them (`worker.credit`)."""

    def __init__(self, options: Advantage) -> None:
        """Raises RpcError(bad_request) with a one-line message if a user-defined function cannot be used.

        The function is called as `fn(rewards, groups, loss_tokens, **params)` with arrays of shape [N], and returns N
        numbers.
        """
        self._options = options
        self._function: Callable[..., object] | None = None
        if is_function(options.name) and not options.per_token:
            try:
                self._function = find_function(options.name, "algorithm.advantage.name", 3, options.params)
            except ValueError as error:
                raise BadInput(str(error)) from error

    def __call__(self, rewards: Array, groups: Array, loss_tokens: Array) -> Array:
        """Return the advantages, float32 [N].

        They contain infinities or NaN if rewards are near float32's limit or a user-defined function returns such
        values. Raises ValueError if a user-defined function does not return N numbers.
        """
        if not len(rewards):
            return np.zeros(0, dtype=np.float32)
        options, values = self._options, rewards.astype(np.float64)
        advantages: Array
        if self._function is not None:
            advantages = np.asarray(self._function(values, groups, loss_tokens, **options.params))
            if advantages.shape != values.shape or advantages.dtype.kind not in "fiu":
                raise ValueError(
                    f"advantage {options.name} returned {advantages.dtype} {list(advantages.shape)}; it must return "
                    f"{len(values)} numbers"
                )
        elif options.name == "none":
            advantages = np.zeros_like(values)
        elif options.name == "grpo":
            advantages = grpo(values, groups, std_epsilon=options.std_epsilon if options.scale == "std" else None)
        elif options.name == "dr_grpo":
            advantages = grpo(values, groups, std_epsilon=None)
        elif options.name == "rloo":
            advantages = rloo(values, groups)
        elif options.name == "opo":
            advantages = opo(values, groups, loss_tokens)
        elif options.name == "reinforce_pp":
            advantages = reinforce_pp(values, loss_tokens)
        elif options.name == "reinforce_pp_baseline":
            advantages = reinforce_pp(grpo(values, groups, std_epsilon=None), loss_tokens)
        else:
            raise ValueError(f"advantage {options.name!r}: no such estimator")
        with np.errstate(over="ignore"):  # the caller checks for infinite values
            return advantages.astype(np.float32)


def grpo(rewards: Array, groups: Array, *, std_epsilon: float | None) -> Array:
    """Return A = (r - group mean) / (group std + epsilon), without the division if `std_epsilon` is None.

    The standard deviation is unbiased and covers the group's surviving samples. In a group of one sample, A is 0.
    Sources: DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without division: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    counts = np.bincount(groups)
    deviations = rewards - _mean(rewards, groups)[groups]
    if std_epsilon is None:
        return deviations
    squares = np.bincount(groups, weights=deviations**2)
    std = np.sqrt(squares / np.maximum(counts - 1, 1))
    advantages: Array = deviations / (std + std_epsilon)[groups]
    return advantages


def rloo(rewards: Array, groups: Array) -> Array:
    """Return A = r - mean of the *other* samples in the group = G / (G - 1) (r - group mean), or 0 for a group of one.

    Source: RLOO (arXiv 2402.14740), the leave-one-out estimator, after Kool et al., "Buy 4 REINFORCE samples, get a
    baseline for free!", 2019.
    """
    counts = np.bincount(groups)
    advantages: Array = (rewards - _mean(rewards, groups)[groups]) * (counts / np.maximum(counts - 1, 1))[groups]
    return advantages


def opo(rewards: Array, groups: Array, loss_tokens: Array) -> Array:
    """Return A = r - b. The group's length-weighted baseline is b = sum(l r) / sum(l), where l counts sampled tokens.

    Source: OPO, On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585), its practical (length-weighted) optimal
    baseline. The baseline of a group without tokens is the plain mean.
    """
    lengths = loss_tokens.astype(np.float64)
    total = np.bincount(groups, weights=lengths)
    weighted = np.bincount(groups, weights=lengths * rewards)
    baseline = np.where(total > 0, weighted / np.maximum(total, 1), _mean(rewards, groups))
    advantages: Array = rewards - baseline[groups]
    return advantages


def reinforce_pp(rewards: Array, loss_tokens: Array) -> Array:
    """Return A = (r - mean) / sqrt(var + 1e-8), with statistics over all sampled tokens of the step.

    Each sample counts once per token, and the variance is unbiased. Applied to rewards minus their group's mean, this
    is the variant with a baseline.
    Source: REINFORCE++ (arXiv 2501.03262), global advantage normalisation; token-weighted statistics as in verl and
    OpenRLHF. In both, the reward is the return-to-go minus a per-token KL; here a KL in the reward is summed per
    sample.
    """
    lengths = loss_tokens.astype(np.float64)
    tokens = lengths.sum()
    if tokens <= 1:
        return np.zeros_like(rewards)
    deviations = rewards - (lengths * rewards).sum() / tokens
    variance = (lengths * deviations**2).sum() / (tokens - 1)
    advantages: Array = deviations / np.sqrt(variance + WHITEN_EPSILON)
    return advantages


def _mean(rewards: Array, groups: Array) -> Array:
    means: Array = np.bincount(groups, weights=rewards) / np.maximum(np.bincount(groups), 1)
    return means
