"""Sends a checkpoint, which rank 0 has read, to the ranks on other hosts, which cannot read its folder."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from proto.messages import TransferParameter
from services.policy_trainer.worker.checkpoint import SavedState
from services.policy_trainer.worker.mesh import from_rank_0 as bytes_from_rank_0
from shared.weights.weight_set import described, room_for


def from_rank_0(state: SavedState | None) -> SavedState:
    """Return rank 0's `state` on every rank, byte for byte. Every rank must call this.

    Other ranks need as much host memory as if they had read the checkpoint themselves.
    """
    step = torch.tensor([0 if state is None else state.step])
    dist.broadcast(step, 0)
    weights = _tensors(None if state is None else state.weights)
    optimizer = _tensors(None if state is None else state.optimizer)
    earlier = _tensors(None if state is None else state.earlier)
    return SavedState(int(step), weights, optimizer, earlier)


def _tensors(mine: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    table = bytes_from_rank_0(b"" if mine is None else msgspec.msgpack.encode(described(mine)))
    rows = msgspec.msgpack.decode(table, type=list[TransferParameter])
    tensors = dict(mine) if mine is not None else room_for(rows)
    for tensor in tensors.values():
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)
    return tensors
