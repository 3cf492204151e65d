"""The loss of each token, as named functions, and the sums that metrics are made of. Never normalises anything.

With r = exp(cur - anchor), W the token's weight and A its sample's advantage:

    anchor proximal: l = -sg[min(exp(prox - rollout), C)] * min(r A, clip(r, 1 - low, 1 + high) A)
    anchor rollout:  l = -min(r A, clip(r, 1 - low, 1 + high) A)

Clipped objective: PPO (arXiv 1707.06347, equation 7). Decoupled anchor: arXiv 2110.00641; truncated importance weight
for the engine's log-probs: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
KL to the reference: k3 of Schulman, "Approximating KL divergence", 2020, as in GRPO (arXiv 2402.03300, equation 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from proto.messages import ErrorCode, LossSpec
from shared.rpc.errors import RpcError


@dataclass(frozen=True)
class TokenData:
    """Masked-in tokens of one micro-batch, each [M] float32 (`versions` int32); `prox`, `ref` if the loss uses them."""

    rollout: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    prox: Tensor | None
    ref: Tensor | None


def check(spec: LossSpec) -> None:
    """Raises RpcError(bad_request) for a loss that this module does not compute."""
    if spec.name != "ppo_clip" or spec.anchor not in ("proximal", "rollout") or spec.kl_estimator not in ("", "k3"):
        raise RpcError(
            ErrorCode.BAD_REQUEST,
            f"loss {spec.name} with anchor {spec.anchor} and KL {spec.kl_estimator or 'none'}: use ppo_clip, "
            "anchor proximal or rollout, KL k3",
        )


def token_loss(spec: LossSpec, cur: Tensor, data: TokenData, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of W * loss over the tokens (a scalar with a gradient), and detached additive sums.

    `cur` [M]: log-probs with a gradient; `entropy` [M]. Sums, each over the tokens: `tokens` 1, `policy` W * policy
    term, `kl` W * k3 (without its coefficient), `loss` W * loss, `clipped` whether the clipped branch won, `entropy`,
    `mismatch` |anchor or cur at the first update - rollout|, `version`.
    """
    anchor = data.rollout if spec.anchor == "rollout" else data.prox
    if anchor is None:
        raise RpcError(ErrorCode.BAD_REQUEST, "anchor proximal without prox_logprobs: run forward first")
    ratio = (cur - anchor).exp()
    unclipped = ratio * data.advantages
    clipped = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high) * data.advantages
    policy = -torch.minimum(unclipped, clipped)
    if spec.anchor == "proximal":
        weight = (anchor - data.rollout).exp()
        policy = policy * (weight.clamp(max=spec.tis_cap) if spec.tis_cap > 0 else weight)
    policy_sum = (data.weights * policy).sum()
    loss_sum, kl_sum = policy_sum, torch.zeros_like(policy_sum)
    if data.ref is not None and spec.kl_estimator:
        delta = data.ref - cur
        kl_sum = (data.weights * (torch.expm1(delta) - delta)).sum()
        loss_sum = policy_sum + spec.kl_coef * kl_sum
    with torch.no_grad():
        own = cur if spec.anchor == "rollout" else anchor
        sums = {
            "tokens": torch.tensor(float(len(cur))),
            "policy": policy_sum,
            "kl": kl_sum,
            "loss": loss_sum,
            "clipped": (clipped < unclipped).sum(),
            "entropy": entropy.sum(),
            "mismatch": (own - data.rollout).abs().sum(),
            "version": data.versions.sum(),
        }
    return loss_sum, {name: value.detach() for name, value in sums.items()}
