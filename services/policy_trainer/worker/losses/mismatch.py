"""Corrections of the policy loss for differences between the engine's log-probs and the trainer's.

They compare the trainer's log-probs at the start of the step (`prox`) with the engine's (`rollout`), and do not apply
to `anchor: rollout`. Both are fixed, so nothing here carries a gradient. No denominator is changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proto.messages import LossSpec
from services.policy_trainer.worker.losses.tokens import TokenData, ratio


@torch.no_grad()
def importance_weight(spec: LossSpec, prox: Tensor, data: TokenData) -> Tensor:
    """Return [M]: min(exp(prox - rollout), C) with C = `tis_cap`, without truncation if C is 0.

    Sources: decoupled PPO (arXiv 2110.00641), the decoupled objective; truncation: Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025.
    """
    weight = ratio(prox - data.rollout)
    return weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight


@torch.no_grad()
def kept(spec: LossSpec, prox: Tensor, data: TokenData) -> Tensor:
    """Return bool [M]: whether a token's ratio is within [low, high], so that its policy loss counts.

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
