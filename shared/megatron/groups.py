"""megatron-core process groups for a layout, and exact copies of tensors over them. Only tensors are sent, never
objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from shared.megatron.cpu_shims import megatron_device
from shared.model.context import ContextRank, sum_over_ranks
from shared.ranks.layout import RankPlace

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Groups:
    """The groups of this rank. All ranks must create their Groups at the same time. A process can have only one
    layout."""

    def __init__(self, place: RankPlace) -> None:
        """Raises ValueError if the process has groups for another layout, or if there are several ranks but no process
        group."""
        layout = place.layout
        if not dist.is_initialized():
            if layout.world_size > 1:
                raise ValueError(f"rank {place.rank} of {layout.world_size}: open the process group first")
            # megatron's optimizer also gathers over a group of one rank, and gloo cannot handle GPU tensors.
            backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backends, store=HashStore(), rank=0, world_size=1)
        if not parallel_state.model_parallel_is_initialized():
            with megatron_device():
                parallel_state.initialize_model_parallel(
                    layout.tp,
                    layout.pp,
                    context_parallel_size=layout.cp,
                    expert_model_parallel_size=layout.ep,
                    order="tp-cp-ep-dp-pp",  # the order of `Layout`
                    create_gloo_process_groups=False,
                    distributed_timeout_minutes=_deadline() / timedelta(minutes=1),
                )
                megatron_random.initialize_rng_tracker(inference_rng_tracker=not torch.cuda.is_available())
                if torch.cuda.is_available():
                    megatron_random.model_parallel_cuda_manual_seed(1)
        degrees = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            dist.get_world_size(),
        )
        if degrees != (layout.tp, layout.pp, layout.cp, layout.ep, layout.world_size):
            raise ValueError(
                f"this process has groups for tp, pp, cp, ep, world {degrees}; {layout} needs a new process"
            )
        self.place = place
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.pp = parallel_state.get_pipeline_model_parallel_group()
        self.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.ep = parallel_state.get_expert_model_parallel_group()
        self.expert_dp = parallel_state.get_expert_data_parallel_group()
        """The ranks that hold the same experts."""
        cp = parallel_state.get_context_parallel_group()
        self.context = ContextRank(place.cp_rank, layout.cp, cp) if layout.cp > 1 else None
        """The ranks across which sequences are split, or None without context parallelism."""
        self.sum_over_sequence_ranks = partial(sum_over_ranks, self.context)

    def merge(self, filled: Tensor, group: dist.ProcessGroup) -> None:
        """Merge in place: each rank of `group` has filled its own part of a zero tensor. Afterwards, each rank holds
        all parts, bit for bit."""
        if group.size() > 1:
            dist.all_reduce(filled.view(_BITS[filled.element_size()]), group=group)

    def gather(self, local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        """Return the tensors from all ranks of `group`."""
        if group.size() == 1:
            return [local]
        shards = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shards, local.contiguous(), group=group)
        return shards

    def largest(self, sizes: Sequence[int]) -> list[int]:
        """Return the largest of the sizes at each position on the ranks that share experts, which may have different
        numbers of sizes."""
        most = torch.tensor([len(sizes)])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.ep)
        largest = torch.zeros(int(most), dtype=torch.int64)
        largest[: len(sizes)] = torch.tensor(sizes, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.ep)
        return cast(list[int], largest.tolist())

    def first_of_tp(self, values: Tensor) -> Tensor:
        """Return rank 0's tensor on all ranks of the tensor-parallel group."""
        if self.tp.size() > 1:
            dist.broadcast(values, group_src=0, group=self.tp)
        return values

    def from_last_stage(self, values: Tensor) -> Tensor:
        """Return the tensor from the last pipeline stage, on all stages."""
        if self.pp.size() > 1:
            dist.broadcast(values, group_src=self.pp.size() - 1, group=self.pp)
        return values

    def to_rank_0(self, tensors: Sequence[Tensor], stage: int) -> list[Tensor] | None:
        """On rank 0, return the tensors from the first rank of pipeline stage `stage`. Elsewhere, return None.

        Rank 0 passes tensors of the same shapes and dtypes, which are overwritten.
        """
        source = stage * (self.place.layout.world_size // self.place.layout.pp)
        if source != 0 and self.place.rank == source:
            for tensor in tensors:
                dist.send(tensor.contiguous(), 0)
        if self.place.rank != 0:
            return None
        if source != 0:
            for tensor in tensors:
                dist.recv(tensor, source)
        return list(tensors)

    def most(self, value: float) -> float:
        """Return the largest `value` across all ranks."""
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)


def _deadline() -> timedelta:
    """Return the time limit for collectives in the group of all ranks. Groups made from this group share the limit."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    deadline: timedelta = backend.options._timeout
    return deadline
