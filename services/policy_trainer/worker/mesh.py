"""Creates the process groups of the torch backend, and sums over them. The sums have no gradient, because autograd does
not see an in-place `all_reduce`. Therefore, `backward` must not be called on a reduced loss.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.model.context import ContextRank, sum_over_ranks
from shared.ranks.layout import RankPlace


class Mesh:
    """The groups of a layout without tensor and pipeline ranks. All ranks must create this object at the same time."""

    def __init__(self, place: RankPlace, device: str) -> None:
        """Raises ValueError if tp, pp or ep is above 1, because only the megatron backend splits layers."""
        layout = place.layout
        if layout.tp * layout.pp * layout.ep > 1:
            degrees = f"tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
            raise ValueError(f"{degrees}: backend torch supports only dp and cp; use backend megatron")
        self.place = place
        self.context: ContextRank | None = None
        """The ranks across which sequences are split, or None without context parallelism."""
        if layout.cp > 1:
            for first in range(0, layout.world_size, layout.cp):  # every rank must create every group
                group = dist.new_group(list(range(first, first + layout.cp)))
                if first == place.dp_rank * layout.cp:
                    self.context = ContextRank(place.cp_rank, layout.cp, group)
        self.shard_mesh: DeviceMesh | None = None
        if layout.world_size > 1:
            self.shard_mesh = init_device_mesh(device, (layout.world_size,), mesh_dim_names=("dp_cp",))
        self.sum_over_sequence_ranks = partial(sum_over_ranks, self.context)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of a detached tensor over all ranks. Every rank must call this."""
        if self.shard_mesh is None:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total

    def most(self, count: int) -> int:
        """Return the largest `count` over all ranks."""
        if self.shard_mesh is None:
            return count
        value = torch.tensor([count])
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value)


def from_rank_0(mine: bytes) -> bytes:
    """Return rank 0's `mine` on every rank of the default group. Every rank must call this."""
    size = torch.tensor([len(mine)])
    dist.broadcast(size, 0)
    if not int(size):
        return b""
    packed = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == 0:
        packed = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    dist.broadcast(packed, 0)
    return packed.numpy().tobytes()
