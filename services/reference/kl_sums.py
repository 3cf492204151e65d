"""The KL to the reference as a number a sample, for a KL in the reward. Numbers only: nothing here has a gradient."""

from __future__ import annotations

import numpy as np

from proto.tensors import Array

NEEDS = ("rollout_logprobs", "sample_index")
"""Shards that are needed besides those of the reference stage."""


def kl_sums(estimator: str, shards: dict[str, Array], ref: Array, samples: int) -> Array:
    """float32 [samples]: sum over a sample's sampled tokens of the estimate of KL(policy that sampled || reference).

    `shards`: of one task, `ref` float32 [T] its reference log-probs. With d = rollout - ref: k1 d, k2 d^2 / 2,
    k3 exp(-d) + d - 1. Source: Schulman, "Approximating KL divergence", 2020. Raises ValueError for another name.
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
