"""Translates the topology into what the calls of an update carry: the specification of the loss, a weight for the
tokens of each sample, and the numbers of the optimizer step. Workers know nothing of them until they are sent.

A token's weight W is one number per sample, derived from the whole optimizer batch before it is split, times the
token's mask. Every rank sums W * loss over its tokens, and nothing is normalised afterwards. Gradients thus do not
depend on ranks or micro-batches (docs/architecture.md, promise 7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from proto.messages import AdamW, CreditSpec, LossSpec
from proto.tensors import Array
from services.policy_trainer.advantages import WHITEN_EPSILON
from shared.stages import LINEAR_LOSS, VALUE_LOSS, VALUES
from shared.topology.algorithm import Optimizer
from shared.topology.schema import Topology

ADVANTAGES, WEIGHTS = "advantages", "weights"
"""Names of the per-sample scalars that `forward_backward` reads."""
CREDIT_SCALE, CREDIT_SHIFT = "credit_scale", "credit_shift"
"""Names of the per-sample scalars with which `forward_backward` reads advantages of tokens (`ForwardBackward`)."""
SHAPED, LOSS_TOKENS, TRUNCATED = "shaped", "loss_tokens", "truncated"
"""Names of the per-sample scalars that `credit` reads. `loss_tokens` counts the tokens marked for training."""
STATISTICS = ("count", "mean", "squares")
"""Names of the statistics of the advantages of a task's tokens (`CreditDone`). Those of other numbers of the same
tokens have a prefix."""
RETURN, ERROR, FROM_TEACHER = "return_", "error_", "teacher_"
"""Prefixes of the statistics of the returns, of the returns minus the values, and of the log-probs minus the
teacher's."""


def loss_spec(topology: Topology) -> LossSpec:
    """Return the per-token settings in `algorithm`. Absent settings are off.

    A step with a single update does not need a separate forward pass for the proximal policy, because the training pass
    computes its log-probs.
    """
    algorithm = topology.algorithm
    loss, kl, mask = algorithm.loss, algorithm.kl, algorithm.loss.ratio_mask
    in_loss = kl is not None and kl.place == "loss" and kl.coef > 0
    in_rewards = algorithm.distills_in_rewards
    clip_low, clip_high = loss.clip or (0.0, 0.0)
    gate_positive, gate_negative = loss.temperatures or (0.0, 0.0)
    return LossSpec(
        name=loss.name,
        clip_low=clip_low,
        clip_high=clip_high,
        anchor="present" if algorithm.ratio_is_one else loss.anchor,
        temperature=topology.sampling.temperature,
        tis_cap=loss.tis_cap or 0.0,
        kl_estimator=kl.estimator if kl is not None and in_loss else "",
        kl_coef=kl.coef if kl is not None and in_loss else 0.0,
        distill_coef=algorithm.distill.coef if algorithm.distill is not None and not in_rewards else 0.0,
        distill_top_k=algorithm.distilled_tokens,
        entropy_coef=algorithm.entropy_coef,
        dual_clip=loss.dual_clip or 0.0,
        clamp=loss.clamp or "",
        gate_positive=gate_positive,
        gate_negative=gate_negative,
        ratio_mask=mask.level if mask is not None else "",
        mask_low=mask.low if mask is not None else 0.0,
        mask_high=mask.high if mask is not None else 0.0,
        routes=algorithm.route_key,
        balance_coef=algorithm.load_balance.coef,
    )


def linear_spec() -> LossSpec:
    """Return the loss whose gradient is that of the sum of A * output, with the opposite sign."""
    return LossSpec(name=LINEAR_LOSS, clip_low=0.0, clip_high=0.0, anchor="rollout", temperature=1.0)


def value_spec(clip: float | None) -> LossSpec:
    """Return the loss of a critic. `clip` is `critic.value_clip`."""
    bound = clip or 0.0
    return LossSpec(name=VALUE_LOSS, clip_low=bound, clip_high=bound, anchor=VALUES.name, temperature=1.0)


def credit_spec(topology: Topology, turn_scale: float) -> CreditSpec:
    """Return how workers compute advantages per token. `turn_scale` is the factor for the rewards of turns."""
    advantage, kl = topology.algorithm.advantage, topology.algorithm.reward_kl
    lam, distill = 1.0 if advantage.lam is None else advantage.lam, topology.algorithm.distill
    return CreditSpec(
        name=advantage.name,
        gamma=1.0 if advantage.gamma is None else advantage.gamma,
        lam=lam,
        lam_value=lam if advantage.lam_value is None else advantage.lam_value,
        values=topology.critic is not None,
        bootstrap=advantage.truncated == "bootstrap",
        turn_scale=turn_scale,
        kl_estimator="" if kl is None else kl.estimator,
        kl_coef=0.0 if kl is None else kl.coef,
        distill_coef=distill.coef if distill is not None and topology.algorithm.distills_in_rewards else 0.0,
    )


def statistics_of(spec: CreditSpec) -> tuple[str, ...]:
    """Return the names of the statistics that `CreditDone` holds."""
    prefixes = ((RETURN, ERROR) if spec.values else ()) + ((FROM_TEACHER,) if spec.distill_coef else ())
    return (*STATISTICS, *(f"{prefix}{name}" for prefix in prefixes for name in STATISTICS[1:]))


def moments(statistics: Mapping[str, Array], prefix: str = "") -> tuple[float, float, float]:
    """Merge the `STATISTICS` of tasks, in their order: return the count, the mean and the unbiased variance of all
    numbers (0 for fewer than two). `prefix` selects other numbers than the advantages.

    The result does not depend on how the tasks were divided among ranks. Source: Chan, Golub and LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances", 1979, equation 2.1.
    """
    count = mean = squares = 0.0
    names = (STATISTICS[0], *(f"{prefix}{name}" for name in STATISTICS[1:]))
    for other, other_mean, other_squares in zip(*(statistics[name].tolist() for name in names), strict=True):
        if other:
            total, difference = count + other, other_mean - mean
            squares += other_squares + difference * difference * (count * other / total)
            mean += difference * (other / total)
            count = total
    return count, mean, squares / (count - 1) if count > 1 else 0.0


def whitenings(scope: str | None, statistics: Mapping[str, Array], mini_batch_tasks: int) -> tuple[Array, Array]:
    """Return the shift and the scale of each task's advantages, float64 [tasks].

    (A - shift) * scale has mean 0 and variance 1 over the `scope`: "step", or "mini_batch" for consecutive tasks of
    that number. A single number becomes 0. With "none", advantages stay as they are.
    """
    tasks = len(statistics["count"])
    shift, scale = np.zeros(tasks), np.ones(tasks)
    if scope != "none":
        size = mini_batch_tasks if scope == "mini_batch" else max(tasks, 1)
        for first in range(0, tasks, size):
            part = slice(first, first + size)
            _, mean, variance = moments({name: statistics[name][part] for name in STATISTICS})
            shift[part], scale[part] = mean, 1.0 / math.sqrt(variance + WHITEN_EPSILON)
    return shift, scale


def trained_tokens(overlong: str, scalars: Mapping[str, Array]) -> Array:
    """Return int [N]: for each sample, the number of its tokens that count in the loss.

    It is 0 for truncated samples if `overlong` is "mask". Such samples are masked before sum(n) and B of
    `sample_weights` are computed, so that they do not dilute the other samples. Source: overlong filtering in DAPO
    (arXiv 2503.14476), section 3.4.
    """
    tokens = scalars["loss_tokens"]
    return np.where(scalars["truncated"] != 0, 0, tokens) if overlong == "mask" else tokens


def sample_weights(aggregation: str, loss_tokens: Array, *, max_new_tokens: int) -> Array:
    """Return token weights, float32 [N], for the N samples of an optimizer batch.

    `loss_tokens` int [N] is the number of tokens of each sample that count in the loss.

    With n_i = loss_tokens, B = number of samples with n_i > 0, M = number of all samples, L = `max_new_tokens`:

    | aggregation | weight of a token of sample i |
    |---|---|
    | token_mean | 1 / sum(n) (DAPO, arXiv 2503.14476, equation 12) |
    | seq_mean_token_mean | 1 / (n_i B) (DeepSeekMath, arXiv 2402.03300, equation 3) |
    | seq_mean_token_sum | 1 / B |
    | dr_grpo | 1 / (M L) (arXiv 2503.20783, section 3.2) |
    | none | 1, for advantages that are derivatives of the whole loss (`preferences`) |

    Raises ValueError for any other name.
    """
    counts = loss_tokens.astype(np.float64)
    filled = counts > 0
    sequences = max(int(filled.sum()), 1)
    if aggregation == "token_mean":
        weights = filled / max(counts.sum(), 1.0)
    elif aggregation == "seq_mean_token_mean":
        weights = filled / (np.maximum(counts, 1.0) * sequences)
    elif aggregation == "seq_mean_token_sum":
        weights = filled / sequences
    elif aggregation == "dr_grpo":
        weights = filled / (max(len(counts), 1) * max_new_tokens)
    elif aggregation == "none":
        weights = filled
    else:
        raise ValueError(
            f"aggregation {aggregation!r}: use token_mean, seq_mean_token_mean, seq_mean_token_sum or dr_grpo"
        )
    return np.asarray(weights, dtype=np.float32)


def learning_rate(options: Optimizer, step: int) -> float:
    """Return the learning rate of training step `step`, counted from 1 from the first step in which the model is
    updated. It is 0 before step 1.

    The rate rises linearly from lr / w at step 1 to lr at step w = warmup_steps. It then stays there, or falls to
    min_lr, which it has from step D = decay_steps. With p = (step - w) / (D - w):

    | schedule | learning rate |
    |---|---|
    | constant | lr |
    | linear | lr - p (lr - min_lr) |
    | cosine | min_lr + (lr - min_lr) (1 + cos(pi p)) / 2 (SGDR, arXiv 1608.03983, equation 5) |

    The curves are those of `transformers.get_scheduler`, which counts from 0: its update at `step` has the rate of
    `step` - 1. Raises ValueError for a schedule without an end.
    """
    warmup, end = options.warmup_steps, options.decay_steps
    if step < 1:
        return 0.0
    if step <= warmup:
        return options.lr * (step / warmup)
    if options.schedule == "constant":
        return options.lr
    if end is None:
        raise ValueError(f"schedule {options.schedule} has no decay_steps; use Optimizer.over")
    if step >= end:
        return options.min_lr
    done, fall = (step - warmup) / (end - warmup), options.lr - options.min_lr
    if options.schedule == "linear":
        return options.lr - done * fall
    return options.min_lr + fall * (1.0 + math.cos(math.pi * done)) / 2.0


def optimizer_numbers(options: Optimizer, step: int) -> AdamW:
    """Return the numbers of an update of a model in training step `step`, counted as in `learning_rate`."""
    beta1, beta2 = options.betas
    return AdamW(
        lr=learning_rate(options, step),
        beta1=beta1,
        beta2=beta2,
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
    )
