"""Computes the loss of each token, composed of named terms, and the sums from which metrics are derived. Nothing is
normalised. `BatchLoss` binds the loss to the flat arrays of one mini-batch.

With r = exp(cur - anchor), W the token's weight, A its advantage and P the policy loss of `losses.policy`:

    anchor proximal: l = sg[1[kept] min(exp(prox - rollout), C)] P(r, A) + kl_coef KL - entropy_coef H
    anchor present:  the same with prox = sg[cur], which holds until the first update of the step
    anchor rollout:  l = P(r, A) + kl_coef KL - entropy_coef H

The gradient is that of sum(W l). Masking and truncation do not change W. With a teacher, A is the advantage minus
distill_coef (anchor - teacher) (`losses.divergence.distilled`), or l has the term distill_coef KL(teacher || policy)
(`losses.divergence.forward_kl`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from proto.messages import ErrorCode, LossSpec
from proto.tensors import Array
from services.policy_trainer.worker.losses.divergence import (
    KL_LOSSES,
    distilled,
    forward_kl,
    importance_sums,
    importance_weight,
    kept,
    mismatch_sums,
)
from services.policy_trainer.worker.losses.policy import POLICY_LOSSES, PolicyLoss
from services.policy_trainer.worker.losses.tokens import TokenData, weighted
from services.policy_trainer.worker.losses.value import value_loss
from services.policy_trainer.worker.samples import SCORE_KEYS
from shared.model.logprobs import Entropy, Scores
from shared.model.picks import IdsOf
from shared.rpc.errors import RpcError
from shared.stages import LINEAR_LOSS, TEACHER, VALUE_LOSS, VALUES, Per, loss_keys
from shared.tensors_torch import to_device

TEACHER_IDS = TEACHER.makes[1]
RATIO_MASKS = ("", "token", "sequence", "geometric")


def check_value(spec: LossSpec) -> None:
    """Raise RpcError(bad_request) unless `spec` is a loss that a critic supports."""
    if spec.name != VALUE_LOSS or spec.anchor != VALUES.name or spec.clip_low != spec.clip_high:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"loss {spec.name} with anchor {spec.anchor} and clip {spec.clip_low}, {spec.clip_high}: a critic has loss "
            f"{VALUE_LOSS} with anchor {VALUES.name} and two equal numbers",
        )


def check(spec: LossSpec, own: PolicyLoss | None = None) -> PolicyLoss:
    """Return the policy loss that `spec` names. `own` is the topology's function if the name is an import path.

    Raises RpcError(bad_request) if this module does not support the loss.
    """
    policy_loss = own if own is not None and ":" in spec.name else POLICY_LOSSES.get(spec.name)
    wrong = (
        spec.anchor not in ("proximal", "present", "rollout")
        or (spec.kl_estimator and spec.kl_estimator not in KL_LOSSES)
        or spec.ratio_mask not in RATIO_MASKS
    )
    if policy_loss is None or wrong:
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"loss {spec.name} with anchor {spec.anchor}, KL {spec.kl_estimator or 'none'} and ratio mask "
            f"{spec.ratio_mask or 'none'}: use {', '.join(POLICY_LOSSES)} or the topology's own; anchor proximal, "
            f"present or rollout; KL {' or '.join(KL_LOSSES)}; ratio mask {', '.join(RATIO_MASKS[1:])}",
        )
    return policy_loss


def token_loss(
    spec: LossSpec,
    cur: Tensor,
    data: TokenData,
    entropy: Tensor,
    policy_loss: PolicyLoss | None = None,
    *,
    version: int = -1,
    others: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of W * loss over the tokens (a scalar with a gradient) and detached additive sums.

    `cur` [M] are log-probs with a gradient. `entropy` [M] has a gradient if `spec.entropy_coef` is not 0. `policy_loss`
    is the result of `check` and defaults to the loss that `spec` names. `version` is the policy version of the
    trainer's log-probs, or -1 if the model has been updated since that version. `others` [M, k] are log-probs of the
    teacher's top k, with a gradient. The following are summed over the tokens: those of `weighted` with the terms
    `policy`, `kl`, `bonus` (of the entropy) and `distill` (of the forward KL), 1 if the ratio was clipped (`clipped`),
    1 if the ratio mask excluded the token (`masked`), `entropy`, `version`, the sums of `distilled` or, with forward
    KL, that KL (`teacher_kl`) and the probability of the top k (`teacher_mass`), and those of `mismatch_sums` and
    `importance_sums`, which the tokens of cross_entropy do not have, because no engine sampled them.
    """
    if spec.anchor == "present":
        data = replace(data, shards={**data.shards, "prox_logprobs": cur.detach()})
    anchor = data.rollout if spec.anchor == "rollout" else data.prox
    if anchor is None:
        raise RpcError(ErrorCode.BAD_REQUEST, "anchor proximal without prox_logprobs: run forward first")
    from_teacher: dict[str, Tensor] = {}
    if data.teacher is not None and spec.distill_coef:
        advantages, from_teacher = distilled(spec.distill_coef, anchor.detach(), data.teacher, data.advantages)
        data = replace(data, advantages=advantages)
    policy, clipped = (policy_loss or check(spec))(spec, cur, anchor, data)
    counted = torch.ones_like(clipped)
    if spec.anchor != "rollout":
        counted = kept(spec, anchor, data)
        policy = torch.where(counted, policy * importance_weight(spec, anchor, data), torch.zeros_like(policy))
    terms = {"policy": (1.0, policy)}
    if data.ref is not None and spec.kl_estimator:
        terms["kl"] = (spec.kl_coef, KL_LOSSES[spec.kl_estimator](cur, data.ref))
    if others is not None:
        teacher = data.shards["teacher_topk"].to(others.dtype)
        distance = forward_kl(others, teacher)
        terms["distill"] = (spec.distill_coef, distance)
        from_teacher = {"teacher_kl": distance.detach().sum(), "teacher_mass": teacher.exp().sum()}
    if spec.entropy_coef:
        terms["bonus"] = (-spec.entropy_coef, entropy)
    loss, sums = weighted(data, terms)
    with torch.no_grad():
        sums |= {
            "clipped": (clipped & counted).sum(),
            "masked": (~counted).sum(),
            "entropy": entropy.sum(),
            "version": data.versions.sum(),
            **from_teacher,
        }
        if spec.name != "cross_entropy":  # otherwise no engine sampled the tokens
            own = cur if spec.anchor == "rollout" else anchor
            sums |= mismatch_sums(own, data, version) | importance_sums(spec, own, data)
    return loss, {name: value.detach() for name, value in sums.items()}


def value_token_loss(spec: LossSpec, cur: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of W * `value_loss` over the tokens (a scalar with a gradient) and detached additive sums.

    `cur` [M] are values with a gradient. The sums are those of `weighted` with the term `value`, and the number of
    tokens whose value is beyond the clip (`clipped`).
    """
    old, clip = data.shards["values"], spec.clip_high or None
    loss, sums = weighted(data, {"value": (1.0, value_loss(cur, data.shards["returns"], old, clip=clip))})
    with torch.no_grad():
        beyond = (cur - old).abs() > spec.clip_high if clip is not None else torch.zeros_like(cur)
        sums["clipped"] = beyond.sum()
    return loss, {name: value.detach() for name, value in sums.items()}


def linear_token_loss(cur: Tensor, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of -W * A * cur over the tokens (a scalar with a gradient) and detached additive sums.

    `cur` [M] are a model's outputs with a gradient. With A = -dL/ds for the sum s of a sample's outputs, the gradient
    is that of L. The sums are those of `weighted` with the term `linear`, and `version` as in `token_loss`.
    """
    loss, sums = weighted(data, {"linear": (1.0, -data.advantages * cur)})
    sums["version"] = data.versions.sum()
    return loss, {name: value.detach() for name, value in sums.items()}


class BatchLoss:
    """A `TokenLoss` over the samples of this data-parallel rank. It combines a backend's outputs with advantages,
    weights and the shards that the loss reads."""

    def __init__(
        self,
        spec: LossSpec,
        flat: dict[str, Array],
        advantages: Array,
        weights: Array,
        device: str,
        own: PolicyLoss | None = None,
        version: int = -1,
        *,
        keeps: bool = False,
    ) -> None:
        """`flat` holds the joined shards. `advantages` and `weights` are float [T]. For `version` see `token_loss`.
        `keeps` means that the log-probs of all tokens are kept for `kept_logprobs`.

        Raises RpcError(bad_request) if `spec` is not supported.
        """
        self._spec = spec
        self._version = version
        self._policy: PolicyLoss | None = None
        self.entropy: Entropy = "none"
        """The form of entropy that the backend must compute in addition to its outputs."""
        if spec.name == VALUE_LOSS:
            check_value(spec)
        elif spec.name != LINEAR_LOSS:
            self._policy = check(spec, own)
            self.entropy = "gradient" if spec.entropy_coef else "value"
        lengths = flat["lengths"].astype(np.int64)
        # The model's inputs are not copied: the backend has put them on the device.
        keys = [key for key in loss_keys(spec) if key.name not in (*SCORE_KEYS, spec.routes)]
        names = [key.name for key in keys if key.per is Per.TOKEN]
        arrays = [advantages, weights, np.repeat(np.arange(len(lengths)), lengths), *(flat[name] for name in names)]
        own_advantages, own_weights, sequences, *shards = to_device(arrays, torch.device(device))
        self._tokens = TokenData(
            shards=dict(zip(names, shards, strict=True)),
            advantages=own_advantages,
            weights=own_weights,
            sequences=sequences,
            sequence_count=len(lengths),
        )
        of_trained = [key.name for key in keys if key.per is Per.TRAINED]
        self._of_trained: dict[str, Tensor] = {}
        if of_trained:
            arrays = [np.cumsum(flat["loss_mask"], dtype=np.int64) - 1, *(flat[name] for name in of_trained)]
            self._place, *shards = to_device(arrays, torch.device(device))
            self._of_trained = dict(zip(of_trained, shards, strict=True))
        self.others: IdsOf | None = self._teacher_ids if TEACHER_IDS in of_trained else None
        """Returns the ids whose log-probs the backend must compute in addition to its outputs; None: no others."""
        self._kept = torch.zeros(len(flat["loss_mask"]), device=device) if keeps else None

    def __call__(self, scores: Scores, add_up: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        at, cur, entropy = scores.tokens, scores.outputs, scores.entropy
        if self._kept is not None:
            self._kept[at] = cur.detach().float()
        data = self._tokens.at(at, add_up)
        if self._spec.name == LINEAR_LOSS:
            return linear_token_loss(cur, data)
        if self._of_trained:
            rows = self._place[at]
            shards = {name: values[rows] for name, values in self._of_trained.items()}
            data = replace(data, shards={**data.shards, **shards})
        if self._policy is None:
            return value_token_loss(self._spec, cur, data)
        value = torch.zeros_like(cur) if entropy is None else entropy
        return token_loss(self._spec, cur, data, value, self._policy, version=self._version, others=scores.others)

    def _teacher_ids(self, at: Tensor) -> Tensor:
        return self._of_trained[TEACHER_IDS][self._place[at]]

    def kept_logprobs(self) -> Array:
        """Return float32 [T]: the log-probs that the pass computed on this rank, and 0 for all other tokens."""
        size = len(self._tokens.weights)
        kept: Array = np.zeros(size, np.float32) if self._kept is None else self._kept.cpu().numpy()
        return kept
