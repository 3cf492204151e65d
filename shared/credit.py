"""`CreditTask`: the argument passed to an advantage function that works per token. It is plain data that users can
build in their own tests.

    def credit(task: CreditTask, **params) -> advantages                  # numbers of shape [T]
    def credit(task: CreditTask, **params) -> (advantages, returns)       # with a critic, which learns the returns
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from proto.tensors import Array

KL_ESTIMATORS = ("k1", "k2", "k3")
KL_KEYS = ("rollout_logprobs", "sample_index")
"""Keys of the shards that `kl_sums` reads, besides those that a model needs."""


def token_kl(estimator: str, rollout_logprobs: Array, ref_logprobs: Array) -> Array:
    """Return float64 [T]: for each token, an estimate of KL(sampler || reference) from the log-probs of both, [T].

    With d = rollout - reference, the estimator k1 is d, k2 is d^2 / 2 and k3 is exp(-d) + d - 1. Source: Schulman,
    "Approximating KL divergence", 2020. Raises ValueError for any other estimator.
    """
    d: Array = rollout_logprobs.astype(np.float64) - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return np.square(d) / 2
    if estimator == "k3":
        return np.asarray(np.expm1(-d) + d)
    raise ValueError(f"KL estimator {estimator!r}: use k1, k2 or k3")


def kl_sums(estimator: str, shards: Mapping[str, Array], ref: Array, samples: int) -> Array:
    """Return float32 [samples]: per sample, the sum over its sampled tokens of `token_kl`, for a KL term in the reward.

    `shards` has the arrays `KL_KEYS`, `loss_mask` and `lengths`, and `ref` (float32 [T]) is the reference's log-probs.
    Raises ValueError like `token_kl`.
    """
    return sample_sums(shards, token_kl(estimator, shards["rollout_logprobs"], ref), samples).astype(np.float32)


def sample_sums(shards: Mapping[str, Array], values: Array, samples: int) -> Array:
    """Return float64 [samples]: per sample, the sum of `values` [T] over the tokens whose `loss_mask` is not 0.

    `shards` has the arrays `sample_index`, `loss_mask` and `lengths`.
    """
    sample = np.repeat(shards["sample_index"], shards["lengths"])
    masked = np.where(shards["loss_mask"] != 0, values.astype(np.float64), 0.0)
    sums: Array = np.bincount(sample, weights=masked, minlength=samples)
    return sums


@dataclass(frozen=True)
class CreditTask:
    """All surviving samples of one task: G samples in S sequences of T tokens, one after the other, never padded.

    A sample is one or more sequences. A sequence contains its prompt and, for a workflow, the tokens of tools.
    """

    task_id: str
    rewards: Array
    """float64 [G]: the shaped reward of each sample, turn rewards included. A KL in the reward is not included."""
    token_rewards: Array
    """float64 [T]: rewards where they occur. The reward of a turn is at the last sampled token of the turn. The rest of
    the sample's reward is at the last trained token of *every* sequence of the sample. With `algorithm.kl` in the
    reward, each trained token also has its -coef * KL, and with `algorithm.distill` its -coef * the difference to the
    teacher."""
    kl: Array | None
    """float64 [T]: the KL to the reference at trained tokens and 0 elsewhere, or None if the reward has no KL."""
    teacher_kl: Array | None
    """float64 [T]: the engine's log-prob less the teacher's at trained tokens and 0 elsewhere, or None unless
    `algorithm.distill` has kl: reverse."""
    mask: Array
    """bool [T]: the trained tokens. Tokens of prompts, tools and masked samples are not among them."""
    lengths: Array
    """int64 [S]: the number of tokens of each sequence."""
    sample_index: Array
    """int64 [S]: the sample of each sequence."""
    truncated: Array
    """bool [G]: whether the sample was cut off at the length limit."""
    token_ids: Array
    """int64 [T]."""
    rollout_logprobs: Array
    """float64 [T]: the engine's log-probs, 0 at tokens that the policy did not sample."""
    versions: Array
    """int64 [T]: the policy version that sampled the token, else -1."""
    values: Array | None = None
    """float64 [T]: the critic's value of the state before each token that the policy sampled, and 0 elsewhere, or None
    without a critic."""
    value_after: Array | None = None
    """float64 [G]: the critic's value after the last token of each sample, or None unless the advantage is gae with
    truncated: bootstrap."""
