"""Holds a model whose parameters are split across all data- and context-parallel ranks (FSDP2). Gradients are *summed*
over the ranks instead of averaged: every rank's loss is its unscaled share of the whole (docs/architecture.md, promise
7).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from proto.messages import TransferParameter
from services.policy_trainer.worker.mesh import from_rank_0
from services.policy_trainer.worker.spare_memory import SpareMemory
from shared.model.adapter import is_adapted, is_adapter
from shared.model.context import ContextRank
from shared.model.load import blocks_of, named_weights, unfilled
from shared.model.logprobs import TokenScorer
from shared.os_limits import host_bytes
from shared.topology.memory_plan import keeps_whole_gradients
from shared.weights.weight_set import described, nbytes

_LOW = (torch.bfloat16, torch.float16)


class Shards:
    """A `Replica` in pieces. The pieces of trained 16-bit weights are float32, while the passes run in 16 bits.

    Only rank 0 ever holds whole weights; the others hold their pieces and, temporarily, one whole tensor.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, context: ContextRank | None) -> None:
        """`model` has its weights on rank 0, and may be uninitialised elsewhere. Every rank must call this."""
        self._rank = mesh.get_rank()
        dtype = next(model.parameters()).dtype
        named = named_weights(model) if self._rank == 0 else {}
        table = from_rank_0(msgspec.msgpack.encode(described(named)))
        rows = msgspec.msgpack.decode(table, type=list[TransferParameter])
        trained = [row for row in rows if is_adapter(row.name)] if is_adapted(model) else rows
        self._dtypes: dict[str, torch.dtype] = {row.name: getattr(torch, row.dtype) for row in trained}
        self.shapes = {row.name: torch.Size(row.shape) for row in trained}
        """Full shape of every weight of a version."""
        self._bytes = nbytes(trained)
        self.model = model
        # Pieces are cut from unwritten memory, which takes up no room, and are filled from rank 0 below.
        with torch.no_grad(), unfilled():
            for parameter in model.parameters():
                low = parameter.requires_grad and parameter.dtype in _LOW
                kept = torch.float32 if low else parameter.dtype
                parameter.data = torch.empty_like(parameter, dtype=kept)
            for buffer in model.buffers():
                buffer.data = buffer.float() if buffer.dtype in _LOW else buffer
        self.scorer = TokenScorer(self.model, context)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        policy = policy if dtype in _LOW else MixedPrecisionPolicy()
        for block in blocks_of(self.model):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # The root is also resharded after forward: after a pass without backward, it would otherwise keep weights that
        # become stale.
        fully_shard(self.scorer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.masters = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.separate = set(self.masters) if dtype in _LOW else set()
        memory = torch.tensor([_memory_bytes(mesh)])
        dist.all_reduce(memory, op=dist.ReduceOp.MIN)
        elements = sum(master.numel() for master in self.masters.values())
        self._keeps_whole_gradients = keeps_whole_gradients(elements, mesh.size(), int(memory))
        self._spare = SpareMemory(next(self.model.parameters()).device)
        self._set([row.name for row in rows], named)
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def expect_backward(self, *, last: bool) -> None:
        """Prepare for the backward pass of a micro-batch, the `last` one of a batch or an earlier one.

        If the memory allows it, the ranks add up their gradients only in the last one. Until then, each keeps the whole
        gradient of its own micro-batches, in float32 for 16-bit weights.
        """
        cast(Any, self.scorer).set_requires_gradient_sync(last or not self._keeps_whole_gradients)

    def drop_unsummed(self) -> None:
        """Drop the gradients that have not been added up, because a batch has failed before its last micro-batch."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                # No public function of torch does this; in torch 2.13, `reset_iter_state` keeps these gradients.
                group = module._get_fsdp_state()._fsdp_param_group
                for parameter in group.fsdp_params if group is not None else ():
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None

    def after_inference(self) -> None:
        """Free the weights that a pass without a gradient has gathered."""
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def write_back(self) -> None:
        """Copy nothing: the pieces are the masters, and the next pass gathers them again."""
        self._spare.updated()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return copies of the full weights on rank 0 and {} elsewhere. Every rank must call this.

        They are on rank 0's device if they have room there beside the training, otherwise in host memory.
        """
        weights: dict[str, Tensor] = {}
        place = self._spare.place_for(self._bytes) if self._rank == 0 else torch.device("cpu")
        for name, live in self.own_weights().items():
            whole = self.whole(live.to(self._dtypes[name]), place)
            if self._rank == 0:
                weights[name] = whole
        return weights

    def own_weights(self) -> dict[str, Tensor]:
        """Return the live pieces of the weights of a version."""
        return self._live(self._dtypes)

    def _live(self, names: Iterable[str]) -> dict[str, Tensor]:
        live = dict(cast(Any, self.model).named_parameters(remove_duplicate=False))
        live |= dict(self.model.named_buffers())
        return {name: live[name] for name in names}

    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Set every rank's piece of the weights from rank 0's full weights, which must have the live weights' names and
        full shapes. Other ranks may pass {}. Every rank must call this."""
        self._set(self._dtypes, weights)

    @torch.no_grad()
    def _set(self, names: Iterable[str], weights: dict[str, Tensor]) -> None:
        for name, target in self._live(names).items():
            whole = torch.empty(target.shape, dtype=target.dtype, device=target.device)
            if self._rank == 0:
                whole.copy_(weights[name])
            if isinstance(target, DTensor):
                target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))
            else:
                dist.broadcast(whole, 0)
                target.copy_(whole)

    def whole(self, part: Tensor, place: torch.device | None = None) -> Tensor:
        """Return the full tensor of `part`, in memory of its own, on `place` (default: the CPU) of rank 0.

        The result on other ranks is meaningless.
        """
        gathered = isinstance(part, DTensor)
        full = part.full_tensor() if isinstance(part, DTensor) else part
        if self._rank != 0:
            return full.new_empty(0)
        return full.detach().to(place or torch.device("cpu"), copy=not gathered)

    def part(self, whole: Tensor, master: Tensor) -> Tensor:
        """Return this rank's piece of a full tensor that every rank has."""
        moved = whole.to(master.device, master.dtype)
        if not isinstance(master, DTensor):
            return moved.clone()
        return distribute_tensor(moved, master.device_mesh, master.placements, src_data_rank=None)

    def whole_scalar(self, value: Tensor) -> float:
        """Return `value`, a scalar computed over all masters, as the same number on every rank. Every rank must call
        this."""
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    def own_masters(self) -> list[Tensor]:
        """Return an empty list, because the pieces are the masters."""
        return []

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the model on this rank."""
        return [*self.model.parameters(), *self.model.buffers()]


def _memory_bytes(mesh: DeviceMesh) -> int:
    """Return the memory of this rank: that of its GPU, or its share of the host's memory."""
    if mesh.device_type == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return host_bytes() // mesh.size()
