"""Computes the loss of each token, composed of named terms, and the sums from which metrics are derived. Nothing is
normalised.

With r = exp(cur - anchor), W the token's weight, A its sample's advantage and P the policy loss of `losses.policy`:

    anchor proximal: l = sg[1[kept] min(exp(prox - rollout), C)] P(r, A) + kl_coef KL - entropy_coef H
    anchor present:  the same with prox = sg[cur], which holds until the first update of the step
    anchor rollout:  l = P(r, A) + kl_coef KL - entropy_coef H

The gradient is that of sum(W l). Masking and truncation do not change W.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from proto.messages import ErrorCode, LossSpec
from services.policy_trainer.worker.losses import mismatch
from services.policy_trainer.worker.losses.kl import KL_LOSSES
from services.policy_trainer.worker.losses.policy import POLICY_LOSSES, PolicyLoss
from services.policy_trainer.worker.losses.tokens import Term, TokenData, weighted
from shared.rpc.errors import RpcError

RATIO_MASKS = ("", "token", "sequence", "geometric")


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
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of W * loss over the tokens (a scalar with a gradient) and detached additive sums.

    `cur` [M] are log-probs with a gradient. `entropy` [M] has a gradient if `spec.entropy_coef` is not 0. `policy_loss`
    is the result of `check` and defaults to the loss that `spec` names. `version` is the policy version of the
    trainer's log-probs, or -1 if the model has been updated since that version. The following are summed over the
    tokens: those of `weighted` with the terms `policy`, `kl` and `bonus` (of the entropy), 1 if the ratio was clipped
    (`clipped`), 1 if the ratio mask excluded the token (`masked`), `entropy`, `version`, and the sums of
    `mismatch.mismatch_sums` and `mismatch.importance_sums`. No engine sampled the tokens of cross_entropy, so it has no
    importance sums, and its mismatch is 0.
    """
    if spec.anchor == "present":
        data = replace(data, shards={**data.shards, "prox_logprobs": cur.detach()})
    anchor = data.rollout if spec.anchor == "rollout" else data.prox
    if anchor is None:
        raise RpcError(ErrorCode.BAD_REQUEST, "anchor proximal without prox_logprobs: run forward first")
    policy, clipped = (policy_loss or check(spec))(spec, cur, anchor, data)
    counted = torch.ones_like(clipped)
    if spec.anchor != "rollout":
        counted = mismatch.kept(spec, anchor, data)
        policy = torch.where(counted, policy * mismatch.importance_weight(spec, anchor, data), torch.zeros_like(policy))
    terms = {"policy": Term(policy)}
    if data.ref is not None and spec.kl_estimator:
        terms["kl"] = Term(KL_LOSSES[spec.kl_estimator](cur, data.ref), spec.kl_coef)
    if spec.entropy_coef:
        terms["bonus"] = Term(entropy, -spec.entropy_coef)
    loss, sums = weighted(data, terms)
    with torch.no_grad():
        sums |= {
            "clipped": (clipped & counted).sum(),
            "masked": (~counted).sum(),
            "entropy": entropy.sum(),
            "version": data.versions.sum(),
        }
        own, sampled = cur if spec.anchor == "rollout" else anchor, spec.name != "cross_entropy"
        sums |= mismatch.mismatch_sums(own, data, version, sampled=sampled)
        if sampled:
            sums |= mismatch.importance_sums(spec, own, data)
    return loss, {name: value.detach() for name, value in sums.items()}
