"""Per-sample advantage estimators: rewards in, advantages out. Never sees a token or a tensor of the model."""

from __future__ import annotations

import numpy as np

from proto.tensors import Array

STD_EPSILON = 1e-6
"""Added to a group's standard deviation; verl uses 1e-6, TRL 1e-4."""


def grpo(rewards: Array, group_of_sample: Array, *, scale: str) -> Array:
    """A_i = (r_i - mean of its group) / (std of its group + 1e-6); with `scale` "none" not divided.

    `rewards` float [N]; `group_of_sample` int [N], groups numbered from 0. Returns float32 [N]. The standard deviation
    is the unbiased one over the group's survivors; a group of one gets 0.

    Sources: DeepSeekMath (arXiv 2402.03300), section 4.1.2; undivided: Dr. GRPO (arXiv 2503.20783), section 3.2.
    Raises ValueError for an unknown `scale`.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"advantage scale {scale!r}: use std or none")
    if not len(rewards):
        return np.zeros(0, dtype=np.float32)
    values = rewards.astype(np.float64)
    counts = np.bincount(group_of_sample)
    means = np.bincount(group_of_sample, weights=values) / np.maximum(counts, 1)
    deviations = values - means[group_of_sample]
    if scale == "std":
        squares = np.bincount(group_of_sample, weights=deviations**2)
        std = np.sqrt(squares / np.maximum(counts - 1, 1))
        deviations = deviations / (std + STD_EPSILON)[group_of_sample]
    return deviations.astype(np.float32)
