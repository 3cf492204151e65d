"""Imports user-defined policy losses, once, when a worker starts. Import paths in messages are not followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from proto.messages import ErrorCode, LossSpec
from services.policy_trainer.worker.losses.policy import PolicyLoss, Terms
from services.policy_trainer.worker.losses.tokens import TokenData
from shared.rpc.errors import BadInput, RpcError
from shared.topology.algorithm import Loss, is_function
from shared.user_function import find_function


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
