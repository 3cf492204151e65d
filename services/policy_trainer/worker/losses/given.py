"""The losses of clients' models, whose targets, weights, advantages and anchors are given. Source of the formulas: the
documentation of the Tinker API, "Loss functions".

Each is a function of the log-probs `cur` [M], which have a gradient, and the shards of the same M targets, and returns
one value per target and detached sums for metrics. The loss is the sum of the values, never their mean. With
r = exp(cur - anchor), thresholds apply to r itself. A target with advantage 0 contributes nothing, whatever its anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from proto.messages import LossSpec
from shared.stages import GIVEN_LOSSES

Values = tuple[Tensor, dict[str, Tensor]]
_WEIGHTS, _ADVANTAGES, _ANCHOR = "token_weights", "token_advantages", "anchor_logprobs"


def cross_entropy(_spec: LossSpec, cur: Tensor, shards: Mapping[str, Tensor]) -> Values:
    """Return -W cur."""
    return -shards[_WEIGHTS] * cur, {}


def importance_sampling(_spec: LossSpec, cur: Tensor, shards: Mapping[str, Tensor]) -> Values:
    """Return -r A."""
    return -_ratio(cur, shards) * shards[_ADVANTAGES], {}


def ppo(spec: LossSpec, cur: Tensor, shards: Mapping[str, Tensor]) -> Values:
    """Return -min(r A, clip(r) A)."""
    r, advantages = _ratio(cur, shards), shards[_ADVANTAGES]
    clipped = r.clamp(spec.clip_low, spec.clip_high) * advantages
    return -torch.minimum(r * advantages, clipped), {"clipped": (clipped < r * advantages).sum()}


def cispo(spec: LossSpec, cur: Tensor, shards: Mapping[str, Tensor]) -> Values:
    """Return -sg[clip(r)] cur A."""
    r = _ratio(cur, shards).detach()
    clipped = r.clamp(spec.clip_low, spec.clip_high)
    return -clipped * cur * shards[_ADVANTAGES], {"clipped": (clipped != r).sum()}


def dro(spec: LossSpec, cur: Tensor, shards: Mapping[str, Tensor]) -> Values:
    """Return -(cur A - beta / 2 (cur - anchor)^2)."""
    return 0.5 * spec.beta * (cur - shards[_ANCHOR]).square() - cur * shards[_ADVANTAGES], {}


def _ratio(cur: Tensor, shards: Mapping[str, Tensor]) -> Tensor:
    """Return r, and 1 without a gradient where the advantage is 0: there, an infinite r would make the loss NaN."""
    return torch.where(shards[_ADVANTAGES] != 0, cur - shards[_ANCHOR], torch.zeros_like(cur)).exp()


LOSSES: Mapping[str, Callable[[LossSpec, Tensor, Mapping[str, Tensor]], Values]] = MappingProxyType(
    dict(zip(GIVEN_LOSSES, (cross_entropy, importance_sampling, ppo, cispo, dro), strict=True))
)
