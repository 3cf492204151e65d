"""A model whose parameters are split over all data- and context-parallel ranks (FSDP2). Gradients are *summed* over the
ranks instead of averaged: every rank's loss is its plain share of the whole (docs/architecture.md, promise 7).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from services.policy_trainer.worker.blocks import blocks_of
from shared.model.context import ContextRank
from shared.model.load import named_weights
from shared.model.logprobs import LogprobScorer

_LOW = (torch.bfloat16, torch.float16)


class Shards:
    """A `Replica` in pieces. The pieces of 16-bit weights are float32, while the passes run in 16 bits."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, context: ContextRank | None) -> None:
        dtype = next(model.parameters()).dtype
        named = named_weights(model)
        self._dtypes = {name: tensor.dtype for name, tensor in named.items()}
        self.shapes = {name: tensor.shape for name, tensor in named.items()}
        """Full shape of every weight."""
        self.model = model.float() if dtype in _LOW else model
        self.scorer = LogprobScorer(self.model, context)
        low = dtype in _LOW
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
        for block in blocks_of(self.model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # The root is resharded after forward, too: a pass without backward would keep weights that become stale.
        fully_shard(self.scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.masters = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        self.separate = set(self.masters) if dtype in _LOW else set()
        self._rank = mesh.get_rank()

    def after_inference(self) -> None:
        """Free the weights that a pass without a gradient has gathered."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def write_back(self) -> None:
        """Do nothing: the pieces are the masters, and the next pass gathers them anew."""

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return full weights on the host on rank 0 and {} elsewhere. Every rank has to call this."""
        found: dict[str, Tensor] = {}
        for name, live in self.own_weights().items():
            whole = self.whole(live)
            if self._rank == 0:
                found[name] = whole.to(self._dtypes[name])
        return found

    def own_weights(self) -> dict[str, Tensor]:
        """Return the live pieces of all weights."""
        live = dict(cast(Any, self.model).named_parameters(remove_duplicate=False))
        live |= dict(self.model.named_buffers())
        return {name: live[name] for name in self._dtypes}

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Copy this rank's pieces from full weights of the same names and shapes."""
        for name, target in self.own_weights().items():
            target.copy_(self.part(weights[name], target))

    def whole(self, part: Tensor) -> Tensor:
        """Return the full tensor of `part` on the host of rank 0. The result of other ranks is meaningless."""
        full = part.full_tensor() if isinstance(part, DTensor) else part
        return full.detach().to("cpu", copy=True) if self._rank == 0 else full.new_empty(0)

    def part(self, whole: Tensor, master: Tensor) -> Tensor:
        """Return this rank's piece of a full tensor that every rank has."""
        moved = whole.to(master.device, master.dtype)
        if not isinstance(master, DTensor):
            return moved.clone()
        return distribute_tensor(moved, master.device_mesh, master.placements, src_data_rank=None)

    def whole_scalar(self, value: Tensor) -> float:
        """Return `value`, computed over all masters, as a number, equal on every rank. Every rank has to call this."""
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    @property
    def trained_shapes(self) -> list[torch.Size]:
        """Full shape of every master."""
        return [master.shape for master in self.masters.values()]

    def own_masters(self) -> list[Tensor]:
        """Return an empty list, because the pieces are the masters."""
        return []

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the model on this rank."""
        return [*self.model.parameters(), *self.model.buffers()]
