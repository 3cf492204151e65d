"""The declared graph of stages a train task goes through: who needs which shards, who makes which.

A task is ready for a stage when all keys it needs are accepted. A new stage (a critic, a judge) is one declaration.

Shards of one task (S sequences, T tokens in total, prompt included; ragged, never padded):

| key | dtype, shape | |
|---|---|---|
| token_ids | int32 [T] | sequences one after the other |
| lengths | int32 [S] | tokens a sequence; sums to T |
| sample_index | int32 [S] | which sample of the group a sequence belongs to, 0-based among the survivors |
| loss_mask | uint8 [T] | 1 where the policy sampled the token (the sampled EOS included) |
| rollout_logprobs | float32 [T] | the engine's log-prob of each sampled token at the sampling temperature, else 0 |
| versions | int32 [T] | policy version that sampled the token, else -1 |
| ref_logprobs | float32 [T] | the frozen reference's, of logits / temperature, where loss_mask is 1, else 0 |
| prox_logprobs:<call> | float32 [T] | the trainer's own at the start of the step, likewise |

`<call>` is the driver's incarnation (hexadecimal), `-` and the order of its `Forward`: a step that is replayed may give
other bits (other weights, another number of ranks), and a shard never changes. It is a revision (proto/SPEC.md, names):
the store lets go of the former call's shards once the later ones are sealed. The part of stage `proximal` in a batch's
metadata names the key.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "train"
WEIGHTS = "weights"
"""Split name of weight shards: task id `weights/<lineage>/<step>`, one key a parameter."""

REFERENCE_SCALAR = "reference_step"
"""Which version of the policy the reference stood at (with `algorithm.kl.refresh_every`)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a task's life before it is READY. `service` is who leases it."""

    name: str
    service: str
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    scalars: frozenset[str] = frozenset()
    """Per-sample values that its results may bring besides; the rollout stage brings whichever it likes."""


ROLLOUT = Stage(
    "rollout",
    "rollout",
    needs=(),
    makes=("token_ids", "lengths", "sample_index", "loss_mask", "rollout_logprobs", "versions"),
)
REFERENCE = Stage(
    "reference",
    "reference",
    needs=("token_ids", "lengths", "loss_mask"),
    makes=("ref_logprobs",),
    scalars=frozenset(["kl", REFERENCE_SCALAR]),
)
"""Scalar `kl`, only with the KL in the reward: the sum over the sample's tokens, from `rollout_logprobs`. Scalar
`reference_step`, only with a refreshed reference: the step of the policy version that scored, 0 for the first model."""
PROXIMAL = Stage("proximal", "policy-trainer", needs=("token_ids", "lengths", "loss_mask"), makes=("prox_logprobs",))
"""Made by the trainer itself once a task is BATCHED; never leased. In the stores under `prox_logprobs:<call>`."""


def train_graph(*, with_reference: bool) -> tuple[Stage, ...]:
    """The stages that a train task must pass to be READY, in topological order."""
    return (ROLLOUT, REFERENCE) if with_reference else (ROLLOUT,)
