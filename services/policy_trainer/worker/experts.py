"""Counts which experts of a mixture a batch uses, and balances their load. Only predictors of trained tokens count,
each as often as sequences train it, over all ranks, so that no split of the batch changes a number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from proto.tensors import Array
from shared.model.routing import Routed, Routers


class ExpertLoad:
    """The choices of each expert of each layer, int64 [L, E], in one optimizer batch."""

    def __init__(self, routers: Routers, device: torch.device) -> None:
        self._routers = routers
        self.counts = torch.zeros(routers.layers, routers.experts, dtype=torch.int64, device=device)

    def add(self, routed: Routed) -> None:
        """Add the choices of a micro-batch on this rank."""
        self.counts += routed.counts

    def add_given(self, packed: Array, loss_mask: Array) -> None:
        """Add the choices that `packed` uint8 [T, W] gives to the predictors of the tokens with mask 1."""
        if not loss_mask.any():  # a rank without samples
            return
        routes = self._routers.unpacked(packed[np.flatnonzero(loss_mask) - 1])
        for layer in range(self._routers.layers):
            counts = np.bincount(routes[:, layer].ravel(), minlength=self._routers.experts)
            self.counts[layer] += torch.from_numpy(counts).to(self.counts.device)

    def over_ranks(self, add_up: Callable[[Tensor], Tensor]) -> ExpertLoad:
        """Return the load of all ranks. Every rank must call this."""
        self.counts = add_up(self.counts)
        return self

    def metrics(self) -> dict[str, float]:
        """Return the largest load of an expert over the mean load of its layer, and the number of unused experts in all
        layers. The names end in `_max`, because the ranks agree on them."""
        counts = self.counts.double()
        means = counts.mean(-1, keepdim=True).clamp_min(1e-30)
        unused = float((self.counts == 0).sum())
        return {"moe_load_max": float((counts / means).max()), "moe_unused_max": unused}

    def balance(self, coef: float, mass: Tensor) -> Tensor:
        """Return a micro-batch's part of the load-balancing loss: the sum over the layers of coef E sum_e(f_e P_e).

        f_e is the share of expert e in all choices of the batch, without a gradient. P_e is the mean probability of
        expert e over the T counted tokens, of which the micro-batch has `mass` / T. The parts of all micro-batches add
        up. Source: Switch Transformers (arXiv 2101.03961, equations 4 to 6); with k experts per token as in Megatron.
        """
        choices = self.counts.sum(-1, keepdim=True).clamp_min(1).to(mass.dtype)
        tokens = choices / self._routers.chosen
        return coef * self._routers.experts * (self.counts.to(mass.dtype) / choices * mass / tokens).sum()


def sums_of(routed: Routed, *, replayed: bool) -> dict[str, Tensor]:
    """Return the sums over the counted tokens of the entropy of the routers and, with given routes, of the share of
    them that the routers would not have chosen."""
    sums = {"moe_entropy": routed.entropy.detach()}
    return {**sums, "moe_strayed": routed.strayed.detach()} if replayed else sums
