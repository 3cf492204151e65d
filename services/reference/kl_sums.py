"""Sums the KL to the reference over each sample, for a KL term in the reward. No gradients are computed."""

from __future__ import annotations

import numpy as np

from proto.tensors import Array

NEEDS = ("rollout_logprobs", "sample_index")
"""Keys of the shards that are needed in addition to those of the reference stage."""


def kl_sums(estimator: str, shards: dict[str, Array], ref: Array, samples: int) -> Array:
    """Return float32 [samples]: per sample, the sum over its sampled tokens of an estimate of KL(sampler || reference).

    `shards` holds the shards of one task, and `ref` (float32 [T]) its reference log-probs. With d = rollout - ref, the
    estimator k1 is d, k2 is d^2 / 2 and k3 is exp(-d) + d - 1. Source: Schulman, "Approximating KL divergence", 2020.
    Raises ValueError for any other estimator.
    """
    d = shards["rollout_logprobs"].astype(np.float64) - ref
    if estimator == "k1":
        values = d
    elif estimator == "k2":
        values = d**2 / 2
    elif estimator == "k3":
        values = np.expm1(-d) + d
    else:
        raise ValueError(f"KL estimator {estimator!r}: use k1, k2 or k3")
    sample = np.repeat(shards["sample_index"], shards["lengths"])
    masked = np.where(shards["loss_mask"] != 0, values, 0.0)
    return np.bincount(sample, weights=masked, minlength=samples).astype(np.float32)
