"""What the difference between the engine's log-probs and the trainer's does to the policy loss. Changes no denominator.

Not with `anchor: rollout`: the trainer's own log-probs of the step's start (`prox`) stand beside the engine's
(`rollout`). Both are fixed, so nothing here carries a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proto.messages import LossSpec
from services.policy_trainer.worker.losses.tokens import TokenData, ratio


@torch.no_grad()
def importance_weight(spec: LossSpec, prox: Tensor, data: TokenData) -> Tensor:
    """[M]: min(exp(prox - rollout), C), C = `tis_cap`; not truncated when it is 0.

    Sources: decoupled PPO (arXiv 2110.00641), the decoupled objective; truncation: Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025.
    """
    weight = ratio(prox - data.rollout)
    return weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight


@torch.no_grad()
def kept(spec: LossSpec, prox: Tensor, data: TokenData) -> Tensor:
    """bool [M]: whether a token's policy loss counts, its ratio exp(prox - rollout) being within [low, high].

    `ratio_mask` token: the token's own ratio (IcePop: "Every Step Evolves", arXiv 2510.18855, equations 1 and 2);
    sequence: the product over its sequence (as TRL's sequence_mask); geometric: the geometric mean over its sequence
    (as verl's geometric rejection). "": all.
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
