"""Context parallelism: every sequence is split across several ranks, in zig-zag order and with explicit positions, and
attention spans the whole sequence. A label belongs to the node that predicts it, so the split only decides which rank
holds the node.

A sequence of L slots (padded to a multiple of 2n) is split into 2n chunks. Rank r of n holds chunks r and 2n-1-r, so
that all ranks compute about the same number of attention pairs. Keys and values are gathered from all ranks and put
into the order of their positions, so that each chunk attends causally to the keys up to its end. In the backward pass
their gradients are summed over the ranks and each rank takes its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shared.model.attention import UNKNOWN_TERMS, attend, attend_at_end, in_rows
from shared.model.tree import AttentionBlock, MicroBatch
from shared.tensors_torch import to_device

NAME = "rlbus_context"


@dataclass(frozen=True)
class ContextRank:
    """This rank among the `size` ranks of `group`, which hold parts of the same sequences."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class CutBatch:
    """The nodes of a micro-batch that belong to one rank. The blocks hold only this rank's slots; `longest[b]` counts
    the slots of all ranks."""

    batch: MicroBatch
    longest: list[int]


@dataclass(frozen=True)
class ContextBlock:
    """A block on the device: `gather` [R * Ll], the nodes of the local slots."""

    rows: int
    gather: Tensor


@dataclass(frozen=True)
class Cut:
    """The part of a `CutBatch` that the attention function needs."""

    blocks: list[ContextBlock]
    scatter: Tensor
    ranks: ContextRank


def sum_over_ranks(ranks: ContextRank | None, values: Tensor) -> Tensor:
    """Return the elementwise sum of a detached tensor over the ranks that hold parts of the same sequences."""
    if ranks is None:
        return values
    total = values.detach().clone()
    dist.all_reduce(total, group=ranks.group)
    return total


def local_slots(longest: int, rank: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the slots that `rank` holds, ascending: positions in a row padded to `longest`, a multiple of 2 * size."""
    chunk = longest // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return np.concatenate([np.arange(first, first + chunk), np.arange(second, second + chunk)])


def cut(batch: MicroBatch, rank: int, size: int) -> CutBatch:
    """Return the part of `batch` that `rank` of `size` holds. Rows are chains, because the batch was planned without
    sharing.

    A rank without nodes gets a dummy node, so that it takes part in the collectives of every layer.
    """
    count = len(batch.token_ids)
    slots_in_all = sum(block.rows * block.longest for block in batch.blocks)
    node_at_slot = np.full(slots_in_all, -1, dtype=np.int64)
    node_at_slot[batch.scatter] = np.arange(count)
    slots: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    longest: list[int] = []
    begin = 0
    for block in batch.blocks:
        nodes_RL = node_at_slot[begin : begin + block.rows * block.longest].reshape(block.rows, block.longest)
        begin += block.rows * block.longest
        padded = -(-block.longest // (2 * size)) * 2 * size
        whole_RL = np.full((block.rows, padded), -1, dtype=np.int64)
        whole_RL[:, : block.longest] = nodes_RL
        slots.append(whole_RL[:, local_slots(padded, rank, size)])
        longest.append(padded)
    flat = np.concatenate([part.reshape(-1) for part in slots])
    scatter = np.flatnonzero(flat >= 0)
    nodes = flat[scatter]
    to_local = np.full(count, -1, dtype=np.int64)
    to_local[nodes] = np.arange(len(nodes))
    blocks = [
        AttentionBlock(part.shape[0], part.shape[1], np.where(part >= 0, to_local[part], 0).reshape(-1), None)
        for part in slots
    ]
    token_ids, depths = batch.token_ids[nodes], batch.depths[nodes]
    if not len(nodes):
        token_ids, depths, scatter = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)

    mine_P = to_local[batch.predictors] >= 0
    new_predictor = np.cumsum(mine_P) - 1
    mine_C = mine_P[batch.child_predictor]
    new_child = np.cumsum(mine_C) - 1
    mine_M = mine_C[batch.token_child]
    input_nodes = to_local[batch.input_nodes]
    local = MicroBatch(
        token_ids=token_ids,
        depths=depths,
        blocks=blocks,
        scatter=scatter,
        predictors=to_local[batch.predictors[mine_P]],
        child_predictor=new_predictor[batch.child_predictor[mine_C]],
        child_token=batch.child_token[mine_C],
        tokens=batch.tokens[mine_M],
        token_child=new_child[batch.token_child[mine_M]],
        input_tokens=batch.input_tokens[input_nodes >= 0],
        input_nodes=input_nodes[input_nodes >= 0],
    )
    return CutBatch(local, longest)


def to_cut(cut_batch: CutBatch, ranks: ContextRank, device: torch.device) -> Cut:
    """Return the indices of `cut_batch` on `device`."""
    blocks = cut_batch.batch.blocks
    scatter, *gathers = to_device([cut_batch.batch.scatter, *(block.gather for block in blocks)], device)
    moved = [ContextBlock(block.rows, gather) for block, gather in zip(blocks, gathers, strict=True)]
    return Cut(moved, scatter, ranks)


def attend_cut(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cut: Cut,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Map `query` [1, H, N, D] and `key`, `value` [1, G, N, D] of this rank's nodes to [1, N, H, D].

    Raises ValueError if an unsupported term is given.
    """
    if dropout or attention_mask is not None or any(others.get(name) is not None for name in UNKNOWN_TERMS):
        raise ValueError(f"{type(module).__name__}: no support for dropout, a custom mask or {UNKNOWN_TERMS}")
    heads, dim = query.shape[1], value.shape[3]
    # Gather keys and values together, in one collective per block.
    nodes_NXD = torch.cat([key, value], dim=3)[0].transpose(0, 1)
    q_NHD = query[0].transpose(0, 1)
    outputs: list[Tensor] = []
    for block in cut.blocks:
        q_RHLD = in_rows(q_NHD, block.gather, block.rows)
        all_RGKX = gather_rows(in_rows(nodes_NXD, block.gather, block.rows), cut.ranks)
        k_RGKD, v_RGKD = torch.split(all_RGKX, [key.shape[3], dim], dim=3)
        own = _attend_chunks(q_RHLD, k_RGKD, v_RGKD, cut.ranks, scaling, sliding_window)
        outputs.append(own.transpose(1, 2).reshape(-1, heads * dim))
    slots = torch.cat(outputs)
    return slots.index_select(0, cut.scatter).view(1, -1, heads, dim), None


def _attend_chunks(
    query: Tensor, key: Tensor, value: Tensor, ranks: ContextRank, scaling: float | None, window: int | None
) -> Tensor:
    """Map this rank's `query` [R, H, Ll, D] and all ranks' `key`, `value` [R, G, n * Ll, D] to [R, H, Ll, D].

    Each of the two chunks attends up to its end, or to the `window` latest positions.
    """
    outputs: list[Tensor] = []
    for number, q_RHCD in zip((ranks.rank, 2 * ranks.size - 1 - ranks.rank), query.chunk(2, dim=2), strict=True):
        chunk = q_RHCD.shape[2]
        first, end = number * chunk, (number + 1) * chunk
        if window is None or window >= end:
            outputs.append(attend_at_end(q_RHCD, key[:, :, :end], value[:, :, :end], scaling))
            continue
        seen = slice(max(0, first - window + 1), end)
        own = torch.arange(first, end, device=key.device)[:, None]
        others = torch.arange(seen.start, end, device=key.device)
        mask = (others <= own) & (others > own - window)  # comparisons store one byte for each pair
        outputs.append(attend(q_RHCD, key[:, :, seen], value[:, :, seen], mask, scaling))
    return torch.cat(outputs, dim=2)


def gather_rows(local: Tensor, ranks: ContextRank) -> Tensor:
    """Join the tensors [R, G, Ll, X] of all ranks, in the order of positions, to [R, G, n * Ll, X]. The result has a
    gradient."""
    gathered: Tensor = _Gather.apply(local.contiguous(), ranks)  # type: ignore[no-untyped-call]
    halves = gathered.view(*gathered.shape[:3], 2, gathered.shape[3] // 2, gathered.shape[4])
    return torch.cat([*halves[:, :, :, 0], *reversed(halves[:, :, :, 1].unbind())], dim=2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, ranks: ContextRank) -> Tensor:
        ctx.ranks = ranks
        gathered = local.new_empty((ranks.size, *local.shape))
        dist.all_gather(list(gathered.unbind(0)), local, group=ranks.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Every rank attended to all keys, so the gradient of a key is the sum over the ranks.
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.ranks.group)
        return total[ctx.ranks.rank], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend_cut)
