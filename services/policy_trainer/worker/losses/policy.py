"""Provides the policy losses by name or by import path. Each returns unweighted `(loss [M], whether the ratio was
clipped [M])` for M tokens.

User-defined losses are imported once, when a worker starts. Import paths in messages are not followed.

`cur` [M] are the current log-probs (with a gradient), `anchor` [M] are those in the denominator of the ratio
r = exp(cur - anchor), and A are the advantages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from proto.messages import ErrorCode, LossSpec
from services.policy_trainer.worker.losses.tokens import TokenData, ratio
from shared.rpc.errors import BadInput, RpcError
from shared.topology.algorithm import Loss, is_function
from shared.user_function import find_function

Terms = tuple[Tensor, Tensor]
PolicyLoss = Callable[[LossSpec, Tensor, Tensor, TokenData], Terms]


def ppo_clip(spec: LossSpec, cur: Tensor, anchor: Tensor, data: TokenData) -> Terms:
    """Return -g with g = min(r A, clip(r, 1 - low, 1 + high) A), or g = r A if high is 0.

    With `dual_clip` c, the loss is -max(g, c A) where A < 0.

    Sources: PPO (arXiv 1707.06347), equation 7; separate low and high: DAPO (arXiv 2503.14476), equation 10; dual clip:
    Ye et al. (arXiv 1912.09729), the dual-clip objective.
    """
    return _clipped(spec, ratio(cur - anchor), data.advantages)


def gspo(spec: LossSpec, cur: Tensor, anchor: Tensor, data: TokenData) -> Terms:
    """Return the clipped loss with one ratio per sequence, s = exp(mean of log r over the sequence's tokens).

    The sum over the sequence carries no gradient. Each token gets its gradient through sg[s] exp(cur - sg[cur]); under
    seq_mean_token_mean, this gives the gradient of s itself. In the paper a response is one sequence. If a sample has
    several sequences (from a workflow that begins new contexts), each sequence has its own ratio, because its
    likelihood depends on its own context. The sample's loss is then the mean over its sequences, weighted by their
    trained tokens.
    Source: GSPO (arXiv 2507.18071), equations 5 (the objective) and 7 (s); the token form is its GSPO-token.
    """
    log_s = data.sequence_mean(cur - anchor) + cur - cur.detach()
    return _clipped(spec, ratio(log_s), data.advantages)


def cispo(spec: LossSpec, cur: Tensor, anchor: Tensor, data: TokenData) -> Terms:
    """Return -sg[clamp(r)] A cur. Every token keeps a gradient, however far its ratio is from 1.

    With `clamp` upper, r is clamped to at most 1 + high (TRL, whose epsilon_high is our 1 + high); with both, to
    [1 - low, 1 + high] (verl). If high is 0, r has no upper limit.
    Source: MiniMax-M1 (arXiv 2506.13585), equations 4 and 5.
    """
    r = ratio(cur - anchor).detach()
    clamped = r.clamp(max=1.0 + spec.clip_high) if spec.clip_high > 0 else r
    if spec.clamp == "both":
        clamped = clamped.clamp(min=1.0 - spec.clip_low)
    return -clamped * data.advantages * cur, clamped != r


def sapo(spec: LossSpec, cur: Tensor, anchor: Tensor, data: TokenData) -> Terms:
    """Return -f(r) A with the soft gate f(r) = 4 / tau sigmoid(tau (r - 1)).

    The sign of A selects tau; 0 counts as negative.
    Source: SAPO, Soft Adaptive Policy Optimization (arXiv 2511.20347), equations 5 and 6.
    """
    tau = torch.where(
        data.advantages > 0,
        torch.full_like(data.advantages, spec.gate_positive),
        torch.full_like(data.advantages, spec.gate_negative),
    )
    gate = torch.sigmoid(tau * (ratio(cur - anchor) - 1.0)) * (4.0 / tau)
    return -gate * data.advantages, _none(cur)


def importance_sampling(_spec: LossSpec, cur: Tensor, anchor: Tensor, data: TokenData) -> Terms:
    """Return -r A, whose gradient is that of -sg[r] A cur: the policy gradient, corrected for the sampling policy.

    Source: the off-policy policy gradient, as in equation 6 of PPO (arXiv 1707.06347).
    """
    return -ratio(cur - anchor) * data.advantages, _none(cur)


def cross_entropy(_spec: LossSpec, cur: Tensor, _anchor: Tensor, _data: TokenData) -> Terms:
    """Return -cur: maximum likelihood of the tokens regardless of their advantage (supervised fine-tuning)."""
    return -cur, _none(cur)


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo_clip": ppo_clip,
        "gspo": gspo,
        "cispo": cispo,
        "sapo": sapo,
        "importance_sampling": importance_sampling,
        "cross_entropy": cross_entropy,
    }
)


def own_policy_loss(options: Loss) -> PolicyLoss | None:
    """Return the function that `options` names by import path, or None for a builtin loss.

    Raises RpcError(bad_request) with a one-line message if it cannot be imported or called as
    `fn(cur, anchor, tokens, **params)`.
    """
    if not is_function(options.name):
        return None
    try:
        return user_loss(find_function(options.name, "algorithm.loss.name", 3, options.params), options.params)
    except ValueError as error:
        raise BadInput(str(error)) from error


def user_loss(function: Callable[..., Any], params: Mapping[str, Any]) -> PolicyLoss:
    """Wrap `function` as a policy loss. `fn(cur, anchor, tokens, **params)` with `tokens: TokenData` returns [M].

    The result is weighted, masked and truncated like any other loss. The loss raises RpcError(bad_request) if the
    result is not a tensor of shape [M].
    """

    def loss(spec: LossSpec, cur: Tensor, anchor: Tensor, data: TokenData) -> Terms:
        values = function(cur, anchor, data, **params)
        if not isinstance(values, Tensor) or values.shape != cur.shape:
            shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise RpcError(
                ErrorCode.BAD_REQUEST,
                f"loss {spec.name} returned {shape}; it must return one value per token, {list(cur.shape)}",
            )
        return values, torch.zeros_like(cur, dtype=torch.bool)

    return loss


def _clipped(spec: LossSpec, r: Tensor, advantages: Tensor) -> Terms:
    gain = unclipped = r * advantages
    if spec.clip_high > 0:
        gain = torch.minimum(unclipped, r.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high) * advantages)
    clipped = gain < unclipped
    if spec.dual_clip > 0:
        floor = spec.dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (floor > gain))
        gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
    return -gain, clipped


def _none(cur: Tensor) -> Tensor:
    return torch.zeros_like(cur, dtype=torch.bool)
