"""The log-probs of other tokens of the vocabulary than the scored one, which a head computes where it has the logits of
a token: those of given ids, or the largest.

Ids are given for each token and not for each node of the tree, because the sequences that share a prefix may come with
different ids for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.model.tree import MicroBatch
from shared.tensors_torch import to_device

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Likeliest:
    """Asks for the `count` largest log-probs of each token, among those of the first `among` ids."""

    count: int
    among: int


IdsOf = Callable[[Tensor], Tensor]
"""Returns the ids [M, k] whose log-probs are wanted at the tokens at the positions int64 [M]."""


@dataclass(frozen=True)
class PickedIds:
    """The ids to pick in one micro-batch, int64 [M, k], and int64 [M]: the predictor of each. Both are in the order of
    the children of their tokens, which `children`, int64 [M], holds on the host. `inverse` restores the tokens' order.
    """

    ids: Tensor
    predictors: Tensor
    children: Array
    inverse: Tensor

    @classmethod
    def of(cls, batch: MicroBatch, tokens: Tensor, ids_of: IdsOf) -> PickedIds:
        """Return the picks of `batch`. `tokens` are its tokens on the device."""
        order = np.argsort(batch.token_child, kind="stable")
        inverse = np.argsort(order, kind="stable")
        children = batch.token_child[order]
        order_M, inverse_M, predictor_M = to_device(
            [order, inverse, batch.child_predictor[children]], torch.device(tokens.device)
        )
        return cls(ids_of(tokens)[order_M].long(), predictor_M, children, inverse_M)

    def block(self, rows: slice, children: slice) -> PickedIds:
        """Return the picks at the predictors `rows`, counted from the first, whose children are `children`."""
        begin, end = np.searchsorted(self.children, (children.start, children.stop)).tolist()
        return PickedIds(
            self.ids[begin:end], self.predictors[begin:end] - rows.start, self.children[begin:end], self.inverse
        )


def largest(logprobs_PV: Tensor, wanted: Likeliest) -> tuple[Tensor, Tensor]:
    """Return the ids int64 [P, k] and log-probs [P, k], the largest first."""
    values, ids = logprobs_PV[:, : wanted.among].topk(wanted.count)
    return ids, values


def picked(logprobs_PV: Tensor, picks: PickedIds) -> Tensor:
    """Return the log-probs [M, k] of the picked ids."""
    return logprobs_PV.view(-1)[picks.predictors[:, None] * logprobs_PV.shape[1] + picks.ids]
