"""Defines the random batch on which every peer is recorded. This module needs only numpy, so it runs in any
environment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

GROUPS, GROUP_SIZE, LONGEST = 4, 4, 12
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.28, 3.0
GSPO_CLIP = 0.05
CISPO_UPPER = 1.6
"""Value of TRL's epsilon_high, which is the largest ratio itself, 1 + our clip[1]."""
SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05
KL_COEF, ENTROPY_COEF = 0.04, 0.02
TIS_CAP, MASK_LOW, MASK_HIGH = 1.5, 0.6, 1.8
GEOMETRIC_LOW, GEOMETRIC_HIGH = 0.9, 1.1
"""Bounds of the geometric mean. The mean varies less than the ratio of a token, so these bounds are narrow enough to
mask some sequences."""
MAX_NEW_TOKENS = 16
DPO_BETA, SIMPO_BETA, SIMPO_MARGIN = 0.3, 2.0, 0.5
GAMMA, LAM, VALUE_CLIP = 0.97, 0.9, 0.2


def batch(seed: int = 20) -> dict[str, np.ndarray[Any, Any]]:
    """Return 16 samples of up to 12 tokens, float64 [16, 12] with a `mask`, and rewards [16] in groups of four."""
    rng = np.random.default_rng(seed)
    samples = GROUPS * GROUP_SIZE
    lengths = rng.integers(1, LONGEST + 1, size=samples)
    prox = rng.normal(-1.5, 0.7, size=(samples, LONGEST))
    shape = prox.shape
    return {
        "mask": (np.arange(LONGEST) < lengths[:, None]).astype(np.int64),
        "prox": prox,
        "cur": prox + rng.normal(scale=0.35, size=shape),
        "rollout": prox + rng.normal(scale=0.35, size=shape),
        "ref": prox + rng.normal(scale=0.5, size=shape),
        "entropy": rng.uniform(0.1, 3.0, size=shape),
        "advantages": rng.normal(size=samples),
        "rewards": rng.choice([0.0, 0.25, 1.0, 2.0], size=samples),
        "groups": np.repeat(np.arange(GROUPS), GROUP_SIZE),
    }


def valued(seed: int = 21) -> dict[str, np.ndarray[Any, Any]]:
    """Return 16 conversations of 12 tokens, float64 [16, 12], with the values of a critic. The `mask` has gaps, where a
    tool has answered."""
    rng = np.random.default_rng(seed)
    shape = (GROUPS * GROUP_SIZE, LONGEST)
    mask = (rng.random(shape) < 0.7).astype(np.int64)
    mask[:, 0] = 1
    old = rng.normal(scale=0.5, size=shape)
    return {
        "mask": mask,
        "token_rewards": rng.normal(size=shape) * mask,
        "old_values": old,
        "values": old + rng.normal(scale=0.3, size=shape),
        "returns": old + rng.normal(scale=0.5, size=shape),
    }
