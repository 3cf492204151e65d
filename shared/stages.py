"""The graph of a train task's stages: which shards each stage needs, and which it produces.

A task is ready for a stage when all keys that the stage needs have been accepted. A new stage (a critic, a judge) needs
only one declaration.

Shards of one task (S sequences, T tokens in total, prompt included; ragged, never padded):

| key | dtype, shape | |
|---|---|---|
| token_ids | int32 [T] | the concatenated sequences |
| lengths | int32 [S] | tokens per sequence; sums to T |
| sample_index | int32 [S] | the sample of the group to which a sequence belongs, 0-based among the surviving samples |
| loss_mask | uint8 [T] | 1 where the policy sampled the token (including a sampled EOS) |
| rollout_logprobs | float32 [T] | the engine's log-prob of each sampled token at the sampling temperature, else 0 |
| versions | int32 [T] | policy version that sampled the token, else -1 |
| ref_logprobs | float32 [T] | the reference's log-prob from logits / temperature where loss_mask is 1, else 0 |
| prox_logprobs:<call> | float32 [T] | the trainer's log-prob at the start of the step, defined like ref_logprobs |
| text | uint8 | only for tasks whose samples are recorded: their text (`shared.samples.text`) |
| advantages | float32 [samples] | only for those tasks, once they are trained: the advantage of each sample |
| train_logprobs | float32 [T] | only for those tasks: the trainer's log-prob before its first update on them, else 0 |

`<call>` is the driver's incarnation (hexadecimal), `-` and the number of its `Forward`. A replayed step may produce
different bits (different weights, a different number of ranks), but a shard never changes, so each call has its own
key. The call is a revision (proto/SPEC.md, names): the store deletes the shards of the earlier call once those of the
later call are sealed. In a batch's metadata, the part for stage `proximal` names the key,
including its `<call>`.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "train"
WEIGHTS = "weights"
"""Split name of weight shards. The task id is `weights/<lineage>/<step>`, with one key per parameter."""

TEXT, ADVANTAGES, TRAIN_LOGPROBS = "text", "advantages", "train_logprobs"
"""Keys that only the recorder reads. They belong to no stage."""

REFERENCE_SCALAR = "reference_step"
"""Scalar with the policy version of the reference, present with `algorithm.kl.refresh_every`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a task. `service` is the service that leases tasks for this stage."""

    name: str
    service: str
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    scalars: frozenset[str] = frozenset()
    """Per-sample scalars that the results of this stage may contain. The rollout stage may add any."""


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
"""Scalar `kl` exists only if the KL term is part of the reward. It is summed over the sample's tokens and computed from
`rollout_logprobs`. Scalar `reference_step` exists only if the reference is refreshed. It is the step of the version
that scored the sample, or 0 for the initial model."""
PROXIMAL = Stage("proximal", "policy-trainer", needs=("token_ids", "lengths", "loss_mask"), makes=("prox_logprobs",))
"""Stage that the trainer runs itself once a task is BATCHED. It is not leased; its key is `prox_logprobs:<call>`."""


def train_graph(*, with_reference: bool) -> tuple[Stage, ...]:
    """Return the stages that a train task passes before it is READY, in topological order."""
    return (ROLLOUT, REFERENCE) if with_reference else (ROLLOUT,)
