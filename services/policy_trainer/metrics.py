"""Computes the driver's part of a metrics.jsonl row. Means are computed from sums over workers and calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import SupportsFloat

import numpy as np

from proto.messages import CreditDone, DropReason, ForwardBackwardDone, ForwardDone, OptimStepDone, StepBatch
from proto.tensors import Array
from services.policy_trainer.advantages import KL_SCALAR
from services.policy_trainer.preferences import Compared
from services.policy_trainer.update import ERROR, FROM_TEACHER, RETURN, moments
from shared.stages import REFERENCE_SCALAR
from shared.topology.models import CRITIC, POLICY

LARGEST = "_max"
"""Suffix of the names of sums whose values are combined by taking the maximum instead."""
SYNC_ERROR, SYNC_BYTES, SYNC_SECONDS, SYNC_SENT = "sync_error", "sync_bytes", "sync_seconds", "sync_sent"
"""Names of the scalars that describe the syncs of the weights with which the step was sampled."""
SUMS = (
    *("tokens", "policy", "kl", "entropy", "clipped", "masked", "mismatch", "mismatch_max", "version"),
    *("engine_tokens", "engine", "engine_max", "lag_tokens", "lag"),
    *("teacher_kl", "teacher_gap_max", "teacher_mass"),
    *("weighed", "weight", "weight_squared", "weight_max", "rollout_k1", "rollout_k3"),
    *("moe_entropy", "moe_load_max", "moe_unused_max", "moe_strayed", "balance"),
)
"""A worker's sums over its tokens that count in the loss: 1, W * policy loss, W * KL, entropy, 1 if the ratio was
clipped, 1 if a ratio mask excluded the token, the log-prob mismatch with the rollout (and its maximum, see
`worker.loss`), and the version that sampled the token. The mismatch is also kept separately for tokens sampled by the
version being trained and by earlier versions. `teacher_kl` and `teacher_gap_max` compare the anchor's log-probs with a
teacher's (`worker.losses.divergence.distilled`), and `teacher_mass` is the probability of a teacher's top k. The names
in the last rows belong to importance weights (`worker.losses.mismatch.importance_sums`) and to the routers of a mixture
of experts (`worker.experts`)."""
FAILED = frozenset(DropReason) - {DropReason.FILTERED, DropReason.STALE}
"""Drop reasons that indicate a fixable problem."""
_NO_SAMPLES = MappingProxyType({name: np.zeros(0) for name in ("reward", "length", "truncated")})
"""Empty scalars for a batch whose tasks were all dropped and which therefore has no samples."""


@dataclass
class ModelMetrics:
    """The measurements of one model in a training step. Times are in seconds."""

    forward_s: float = 0.0
    """The time of the forward pass before the first update, if there is one."""
    forward_backward_s: float = 0.0
    optim_s: float = 0.0
    imbalance: float = 1.0
    """Tokens of the fullest data-parallel rank divided by the mean over ranks, in the step's least balanced
    mini-batch."""
    skipped: int = 0
    """Number of updates skipped because of bad data. `sums` does not include their samples."""
    sums: dict[str, float] = field(default_factory=dict)
    updates: list[OptimStepDone] = field(default_factory=list)

    def add_gradient(self, done: ForwardBackwardDone) -> None:
        """Add the results of one `forward_backward`. `worker.loss` documents the names of its sums."""
        add_up(self.sums, done.sums)
        self.forward_backward_s += done.seconds
        self.imbalance = max(self.imbalance, done.imbalance)

    def add_update(self, done: OptimStepDone) -> None:
        self.updates.append(done)
        self.optim_s += done.seconds

    def row(self, model: str) -> dict[str, float]:
        """Return the metrics that every trained model has."""
        return {
            f"{model}/clip_fraction": self.sums.get("clipped", 0.0) / self.tokens,
            f"{model}/grad_norm": sum(update.grad_norm for update in self.updates) / self.count,
            f"{model}/updates_skipped": float(self.skipped),
            f"{model}/lr": self.updates[-1].lr if self.updates else 0.0,
        }

    @property
    def tokens(self) -> float:
        """Number of tokens in `sums`, at least 1."""
        return max(self.sums.get("tokens", 0.0), 1.0)

    @property
    def count(self) -> int:
        """Number of updates, at least 1."""
        return max(len(self.updates), 1)


@dataclass
class StepMetrics:
    """The measurements of one training step. Times are in seconds.

    `publish_s` and `checkpoint_s` are the durations of the last publication and the last checkpoint before this row.
    Publications and checkpoints run during the step after their own, so their durations appear in that step's row (0 if
    none has ended since the previous row).
    """

    step: int
    scored: bool = True
    """Whether the samples have rewards. Those of supervised fine-tuning have none."""
    wait_batch_s: float = 0.0
    publish_s: float = 0.0
    checkpoint_s: float = 0.0
    models: dict[str, ModelMetrics] = field(default_factory=lambda: {POLICY: ModelMetrics()})
    """The measurements of each trained model, by its name."""
    credit: dict[str, float] = field(default_factory=dict)
    """Metrics of advantages per token, of a KL in the reward and of preferences, if the trainer computes them."""

    @property
    def policy(self) -> ModelMetrics:
        return self.models[POLICY]

    @property
    def updates(self) -> int:
        """Number of updates of all models."""
        return sum(len(model.updates) for model in self.models.values())

    def add_forward(self, model: str, done: ForwardDone) -> None:
        """Add the results of a model's `forward`."""
        self.models[model].forward_s += done.seconds
        self.credit |= _kl_row(done.meta.scalars)

    def add_compared(self, compared: Compared) -> None:
        """Add the results of a loss that compares answers."""
        self.credit |= {
            "preference/loss": compared.loss,
            "preference/margin": compared.margin,
            "preference/accuracy": compared.accuracy,
        }

    def add_credit(self, done: CreditDone) -> None:
        """Add the statistics of the step's advantages per token, from before they are whitened, and of the values of a
        critic."""
        _, mean, variance = moments(done.statistics)
        self.credit |= {
            "advantage/mean": mean,
            "advantage/std": math.sqrt(variance),
            "time/credit": done.seconds,
        }
        if f"{FROM_TEACHER}mean" in done.statistics:
            self.credit["teacher/kl"] = moments(done.statistics, FROM_TEACHER)[1]
        if f"{RETURN}mean" in done.statistics:
            _, returned, of_returns = moments(done.statistics, RETURN)
            _, error, of_errors = moments(done.statistics, ERROR)
            self.credit |= {"critic/value_mean": returned - error, "critic/return_mean": returned}
            if of_returns > 0:  # otherwise there is no variance to explain
                self.credit["critic/explained_variance"] = 1.0 - of_errors / of_returns

    def row(self, batch: StepBatch, *, step_s: float) -> dict[str, float]:
        """Return the flat row with the documented keys of metrics.jsonl. `step_s` is the time since the last commit."""
        row, samples = batch_row(batch, scored=self.scored), sum(task.samples for task in batch.batch.tasks)
        updates = [update for model in self.models.values() for update in model.updates]
        row |= {
            "time/step": step_s,
            "time/wait_batch": self.wait_batch_s,
            "time/snapshot": sum(update.snapshot_s for update in updates),
            "time/publish": self.publish_s,
            "time/checkpoint": self.checkpoint_s,
            "throughput/samples_per_s": samples / step_s,
            "throughput/tokens_per_s": row["rollout/length_mean"] * samples / step_s,
        }
        row |= self.credit
        if CRITIC in self.models:
            row |= _critic_row(self.models[CRITIC])
        if not self.policy.updates and not self.policy.skipped and CRITIC in self.models:
            return row  # only the critic is updated in this step
        return row | self._policy_row()

    def _policy_row(self) -> dict[str, float]:
        policy = self.policy
        sums, tokens = dict.fromkeys(SUMS, 0.0) | policy.sums, policy.tokens
        row = policy.row(POLICY) | {
            "rollout/staleness_mean": self.step - 1 - sums["version"] / tokens if sums["tokens"] else 0.0,
            "dispatch/imbalance": policy.imbalance,
            "time/forward_backward": policy.forward_s + policy.forward_backward_s,
            "time/optim": policy.optim_s,
        }
        if "linear" in policy.sums:
            del row[f"{POLICY}/clip_fraction"]  # this loss has no ratio
        else:
            row["loss/policy"] = sums["policy"] / policy.count
            row["policy/entropy"] = sums["entropy"] / tokens
            row["policy/masked_fraction"] = sums["masked"] / tokens
        # Metrics that were not measured are left out: the KL without a reference, and the mismatch of tokens that no
        # engine sampled.
        if "kl" in policy.sums:
            row["loss/kl"] = sums["kl"] / policy.count
        if "teacher_kl" in policy.sums:
            row["teacher/kl"] = sums["teacher_kl"] / tokens
        if "teacher_gap_max" in policy.sums:
            row["teacher/gap_max"] = sums["teacher_gap_max"]
        if "teacher_mass" in policy.sums:
            row["teacher/mass"] = sums["teacher_mass"] / tokens
        if "mismatch" in policy.sums:
            row["rollout/logprob_mismatch"] = sums["mismatch"] / tokens
            row["rollout/logprob_mismatch_max"] = sums["mismatch_max"]
        if sums["engine_tokens"]:
            row["rollout/logprob_mismatch_engine"] = sums["engine"] / sums["engine_tokens"]
            row["rollout/logprob_mismatch_engine_max"] = sums["engine_max"]
        if sums["lag_tokens"]:
            row["rollout/logprob_mismatch_lag"] = sums["lag"] / sums["lag_tokens"]
        if "balance" in policy.sums:
            row["loss/load_balance"] = sums["balance"] / policy.count
        return row | _experts(policy.sums, tokens) | _importance(sums)


def _experts(sums: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Return the metrics of a mixture of experts, or {} for a dense model."""
    if "moe_entropy" not in sums:
        return {}
    row = {
        "moe/entropy": sums["moe_entropy"] / tokens,
        "moe/load_max": sums["moe_load_max"],
        "moe/unused_experts": sums["moe_unused_max"],
    }
    return row | {"moe/replay_mismatch": sums["moe_strayed"] / tokens} if "moe_strayed" in sums else row


def _critic_row(critic: ModelMetrics) -> dict[str, float]:
    return critic.row(CRITIC) | {
        "critic/loss": critic.sums.get("value", 0.0) / critic.count,
        "time/values": critic.forward_s,
        "time/critic": critic.forward_backward_s + critic.optim_s,
    }


def add_up(totals: dict[str, float], part: Mapping[str, SupportsFloat]) -> None:
    """Add `part`, which covers different tokens, to `totals`. For names that end in `_max`, keep the larger value."""
    for name, value in part.items():
        if name.endswith(LARGEST):
            totals[name] = max(totals.get(name, 0.0), float(value))
        else:
            totals[name] = totals.get(name, 0.0) + float(value)


def _importance(sums: Mapping[str, float]) -> dict[str, float]:
    """Return metrics of importance weights and of the KL between rollout and trainer, or {} if no token was weighted.

    The effective sample size is (sum of v)^2 / sum of v^2 (Kish, "Survey Sampling", 1965), divided by the number of
    tokens, as in verl.
    """
    tokens = sums["weighed"]
    if not tokens:
        return {}
    row = {
        "rollout/kl": sums["rollout_k1"] / tokens,
        "rollout/k3_kl": sums["rollout_k3"] / tokens,
        "rollout/is_mean": sums["weight"] / tokens,
        "rollout/is_max": sums["weight_max"],
        "rollout/is_eff_sample_size": sums["weight"] ** 2 / (tokens * sums["weight_squared"]),
    }
    return row | {"rollout/is_capped_fraction": sums["capped"] / tokens} if "capped" in sums else row


def batch_row(batch: StepBatch, *, scored: bool = True) -> dict[str, float]:
    """Return the metrics of the batch alone: without those of rewards unless `scored`. For a step trained by an earlier
    driver, no other metrics are known."""
    scalars = _NO_SAMPLES | batch.scalars
    rewards = scalars["reward"]
    row = {
        "policy/version": float(batch.step),
        "reward/mean": batch.reward_mean_unfiltered,
        "reward/std": float(rewards.std()) if len(rewards) else 0.0,
        "rollout/length_mean": _mean(scalars["length"]),
        "rollout/truncated_fraction": _mean(scalars["truncated"]),
        "rollout/staleness_max": float(batch.step - 1 - scalars["version_min"].min()) if len(rewards) else 0.0,
        "rollout/samples_failed": float(batch.samples_failed),
        "rollout/tasks_dropped": float(batch.dropped),
        "rollout/tasks_filtered": float(batch.drops.get(DropReason.FILTERED, 0)),
        "rollout/tasks_failed": float(sum(batch.drops.get(reason, 0) for reason in FAILED)),
        "rollout/zero_variance_fraction": _zero_variance(batch, rewards),
    }
    row |= {f"rollout/dropped/{reason}": float(count) for reason, count in batch.drops.items()}
    row |= {f"rollout/lost/{reason}": float(count) for reason, count in batch.lost.items()}
    correlation = _length_correlation(batch, rewards, scalars["length"])
    if correlation is not None:
        row["reward/length_correlation"] = correlation
    row |= _named(scalars)
    if SYNC_ERROR in scalars and len(rewards):
        row["sync/canary_error"] = float(scalars[SYNC_ERROR].max())
        row["sync/bytes"] = float(scalars[SYNC_BYTES].max())
        row["time/sync"] = _mean(scalars[SYNC_SECONDS])
        row["sync/sent"] = _mean(scalars[SYNC_SENT])
    row |= _kl_row(scalars)
    if REFERENCE_SCALAR in scalars:
        row["reference/version"] = _mean(scalars[REFERENCE_SCALAR])
    return row if scored else {name: value for name, value in row.items() if not name.startswith("reward/")}


def _kl_row(scalars: Mapping[str, Array]) -> dict[str, float]:
    return {"reward/kl": _mean(scalars[KL_SCALAR])} if KL_SCALAR in scalars else {}


def staleness_counts(batch: StepBatch) -> dict[int, int]:
    """Return a dict that maps the staleness of the oldest token, in versions, to the number of samples."""
    versions = batch.scalars.get("version_min", np.zeros(0))
    return Counter((batch.step - 1 - versions).astype(int).tolist())


def _named(scalars: Mapping[str, Array]) -> dict[str, float]:
    """Return the components of dict rewards and the workflow metrics, averaged over the samples that have a value."""
    finite = {name: values[np.isfinite(values)] for name, values in scalars.items() if "/" in name}
    return {name: float(values.mean(dtype=np.float64)) for name, values in finite.items() if len(values)}


def _groups(batch: StepBatch, values: Array) -> list[Array]:
    """Return the values grouped by task, without tasks that have a single sample."""
    sizes = [task.samples for task in batch.batch.tasks]
    return [group for group in np.split(values, np.cumsum(sizes))[: len(sizes)] if len(group) > 1]


def _length_correlation(batch: StepBatch, rewards: Array, lengths: Array) -> float | None:
    """Return the correlation between reward and length within groups, or None if either is constant in every group."""
    sides = [_groups(batch, values.astype(np.float64)) for values in (rewards, lengths)]
    if not sides[0]:
        return None
    reward, length = (np.concatenate([group - group.mean() for group in groups]) for groups in sides)
    size = float(np.sqrt((reward @ reward) * (length @ length)))
    return float(reward @ length) / size if size > 0 else None


def _zero_variance(batch: StepBatch, rewards: Array) -> float:
    """Return the fraction of groups with equal rewards, including filtered groups; 0 if there are no groups."""
    groups = _groups(batch, rewards)
    filtered = batch.drops.get(DropReason.FILTERED, 0)
    alike = sum(bool((group == group[0]).all()) for group in groups)
    return (alike + filtered) / max(len(groups) + filtered, 1)


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else 0.0
