"""Processes the rewards of samples between the reward functions and the advantage estimator.

The order is: normalisation over the step, overlong penalty, subtraction of the KL to the reference.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from proto.tensors import Array
from shared.topology import Topology

NORMALISE_EPSILON = 1e-8
KL_SCALAR = "kl"
"""Name of the per-sample scalar that the reference provides when the KL is part of the reward."""


def shaped(topology: Topology, scalars: Mapping[str, Array]) -> Array:
    """Return the shaped rewards, float64 [N].

    They are computed from the batch scalars `reward` and `length`, and from `kl` if the KL is part of the reward.
    Raises ValueError if `kl` is needed but missing.
    """
    algorithm, kl = topology.algorithm, topology.algorithm.kl
    rewards = scalars["reward"].astype(np.float64)
    if algorithm.normalise_rewards == "batch":
        rewards = normalised(rewards)
    if algorithm.overlong_penalty is not None:
        limit, penalty = topology.sampling.max_new_tokens, algorithm.overlong_penalty
        rewards = rewards + penalty.factor * overlong_penalty(scalars["length"], limit, penalty.tokens)
    if kl is not None and kl.place == "reward" and kl.coef > 0:
        if KL_SCALAR not in scalars:
            raise ValueError("the batch has no per-sample KL, but algorithm.kl.in is reward: the reference sent none")
        rewards = rewards - kl.coef * scalars[KL_SCALAR].astype(np.float64)
    return rewards


def normalised(rewards: Array) -> Array:
    """Return (r - mean) / (std + 1e-8) over all samples of the step; equal rewards become 0.

    The statistics cover one step, because a running mean would be state that a restarted driver would have to recover.
    """
    found: Array = (rewards - rewards.mean()) / (rewards.std() + NORMALISE_EPSILON) if len(rewards) else rewards
    return found


def overlong_penalty(lengths: Array, max_new_tokens: int, tokens: int) -> Array:
    """Return penalties, float64 [N]: 0 up to length `max_new_tokens - tokens`, then linear to -1 at `max_new_tokens`.

    Source: soft overlong punishment of DAPO (arXiv 2503.14476), equation 13, with L_max = max_new_tokens and
    L_cache = `tokens`.
    """
    over = lengths.astype(np.float64) - (max_new_tokens - tokens)
    found: Array = -np.clip(over / tokens, 0.0, 1.0)
    return found
