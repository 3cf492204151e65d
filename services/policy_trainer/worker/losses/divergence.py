"""Measures how far two log-probs of the same tokens are apart: the policy's and the reference's (KL), and the trainer's
and the engine's, for whose difference the policy loss is corrected.

The estimators of the KL(policy || reference) from one sampled token are differentiable in `cur`.

Corrections compare the trainer's log-probs at the start of the step (`prox`) with the engine's (`rollout`), and do not
apply with `anchor: rollout`. Both are fixed, so corrections carry no gradient. No denominator is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from proto.messages import LossSpec
from services.policy_trainer.worker.losses.tokens import MAX_LOG_RATIO, TokenData, ratio


def k1(cur: Tensor, ref: Tensor) -> Tensor:
    """Return cur - ref, which is unbiased and can be negative.

    Source: Schulman, "Approximating KL divergence", 2020, estimator k1.
    """
    return cur - ref


def k2(cur: Tensor, ref: Tensor) -> Tensor:
    """Return (cur - ref)^2 / 2, which is biased, but whose gradient is that of the KL.

    Source: Schulman, "Approximating KL divergence", 2020, estimator k2.
    """
    return 0.5 * (cur - ref).square()


def k3(cur: Tensor, ref: Tensor) -> Tensor:
    """Return exp(ref - cur) - (ref - cur) - 1, which is unbiased and non-negative.

    Sources: Schulman, "Approximating KL divergence", 2020, estimator k3; GRPO (arXiv 2402.03300), equation 4.
    """
    delta = ref - cur
    return torch.expm1(delta) - delta


@torch.no_grad()
def distilled(coef: float, anchor: Tensor, teacher: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the advantages [M] lowered by `coef` times anchor - teacher, and sums over the tokens: of that difference
    (`teacher_kl`), and its largest absolute value (`teacher_gap_max`).

    With a policy loss whose gradient is -A grad log p, the term has the gradient of coef * KL(policy || teacher) of the
    next token, averaged over the sampled prefixes. The log-probs are those at the start of the step, from which the
    ratio is measured, so several updates of a step have the same advantages.

    Sources: Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649), with reverse KL; Thinking
    Machines Lab, "On-Policy Distillation", 2025, for the form as an advantage.
    """
    difference = anchor - teacher
    largest = difference.abs().max() if len(difference) else difference.sum()
    return advantages - coef * difference, {"teacher_kl": difference.sum(), "teacher_gap_max": largest}


MIN_TAIL = 1e-6
"""Lower bound of the probability of the tokens outside the teacher's top k, which 1 - sum(p) has lost to rounding below
it in float32."""


def forward_kl(cur: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || policy) [M] from log-probs [M, k] of the teacher's likeliest tokens; all others count as one
    token. `cur` are the policy's, with a gradient.

    Sources: Agarwal et al., "On-Policy Distillation of Language Models" (arXiv 2306.13649), with forward KL; the bucket
    of the other tokens as in NeMo-RL's and verl's losses on the teacher's top k.
    """
    likely = teacher.exp()
    rest, own_rest = ((1.0 - p.sum(-1)).clamp(min=MIN_TAIL) for p in (likely, cur.exp()))
    return (likely * (teacher - cur)).sum(-1) + rest * (rest.log() - own_rest.log())


KL_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k2": k2, "k3": k3})
"""Estimators by name. k1 is absent, because its expected gradient in a loss is zero (E[grad log p] = 0)."""


@torch.no_grad()
def importance_weight(spec: LossSpec, prox: Tensor, data: TokenData) -> Tensor:
    """Return the weights [M]: min(exp(prox - rollout), C) with C = `tis_cap`, or without truncation if C is 0.

    Sources: decoupled PPO (arXiv 2110.00641), the decoupled objective; truncation: Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025.
    """
    weight = ratio(prox - data.rollout)
    return weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight


@torch.no_grad()
def kept(spec: LossSpec, prox: Tensor, data: TokenData) -> Tensor:
    """Return bool [M], True where a token's ratio is within [low, high] and its policy loss therefore counts.

    The ratio exp(prox - rollout) depends on `ratio_mask`. token: the token's own ratio (IcePop: "Every Step Evolves",
    arXiv 2510.18855, equations 1 and 2); sequence: the product over its sequence (like TRL's sequence_mask); geometric:
    the geometric mean over its sequence (like verl's geometric rejection). With "" all tokens count.
    """
    difference = prox - data.rollout
    if spec.ratio_mask == "":
        return torch.ones_like(prox, dtype=torch.bool)
    if spec.ratio_mask == "sequence":
        difference = data.sequence_sum(difference)
    elif spec.ratio_mask == "geometric":
        difference = data.sequence_mean(difference)
    r = ratio(difference)
    return (r >= spec.mask_low) & (r <= spec.mask_high)


@torch.no_grad()
def importance_sums(spec: LossSpec, own: Tensor, data: TokenData) -> dict[str, Tensor]:
    """Return sums over the tokens that compare the trainer's log-probs `own` [M] with the engine's, in float64.

    With the importance weight w = exp(own - rollout) and its truncation v = min(w, C), or v = w if C is 0: `weighed`
    sums 1, `weight` v, `weight_squared` v^2, and `capped` whether w > C (absent if C is 0); `weight_max` is the largest
    w; `rollout_k1` and `rollout_k3` estimate KL(rollout || trainer) from tokens that the rollout policy sampled.
    """
    own, rollout = own.double(), data.rollout.double()
    weight = ratio(own - rollout)
    truncated = weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight
    near = rollout + (own - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    sums = {
        "weighed": own.new_full((), float(len(own))),
        "weight": truncated.sum(),
        "weight_squared": truncated.square().sum(),
        "weight_max": weight.max() if len(weight) else weight.sum(),
        "rollout_k1": k1(rollout, own).sum(),
        "rollout_k3": k3(rollout, near).sum(),
    }
    return sums | {"capped": (weight > spec.tis_cap).sum()} if spec.tis_cap > 0 else sums


@torch.no_grad()
def mismatch_sums(own: Tensor, data: TokenData, version: int) -> dict[str, Tensor]:
    """Return sums over the tokens of |own - rollout|, where `own` [M] are the trainer's log-probs at `version`.

    `mismatch` is the sum over all tokens and `mismatch_max` its largest summand. They are also summed separately,
    together with the number of tokens: `engine` over tokens that `version` itself sampled, where engine and trainer
    should agree, and `lag` over tokens that earlier versions sampled. No token counts separately if `version` is -1.
    """
    mismatches, known = (own - data.rollout).abs(), version >= 0
    same, earlier = (data.versions == version) & known, (data.versions < version) & known
    engine = mismatches * same
    return {
        "mismatch": mismatches.sum(),
        "mismatch_max": mismatches.max() if len(mismatches) else mismatches.sum(),
        "engine_tokens": same.sum(),
        "engine": engine.sum(),
        "engine_max": engine.max() if len(engine) else engine.sum(),
        "lag_tokens": earlier.sum(),
        "lag": (mismatches * earlier).sum(),
    }
