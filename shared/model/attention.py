"""Attention over a micro-batch of token trees, for any Hugging Face model that accepts an attention function.

The linear layers run on the packed nodes without padding. Rows are padded only here, block by block. A node attends to
itself and its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shared.model.tree import Array, AttentionBlock, MicroBatch
from shared.tensors_torch import to_device

NAME = "rlbus_tree"
UNKNOWN_TERMS = ("softcap", "s_aux")
"""Arguments that change the attention result of some models. This module does not support them."""


_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_DIM, _FLASH_DIVISOR = 256, 8
"""Maximum size of a head in FlashAttention. It must also be a multiple of the second number."""
_SHARES_KEYS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch's attention for packed sequences lets query heads share key heads, as it has since torch 2.12."""


@dataclass(frozen=True)
class PackedChains:
    """The filled slots of a block of chains, row by row: the `nodes` in them (int64 [P], or a slice if they are
    consecutive), the `slots` int64 [P], and the positions int32 [R + 1] at which each row begins, followed by P."""

    nodes: Tensor | slice
    slots: Tensor
    bounds: Tensor


@dataclass(frozen=True)
class TreeBlock:
    """A `tree.AttentionBlock` on the device. `mask` is bool [R, 1, L, L], true where a slot attends; None for causal
    chains, which are also `packed` if the device has a kernel for packed sequences."""

    rows: int
    longest: int
    gather: Tensor
    depths: Tensor
    mask: Tensor | None
    packed: PackedChains | None


@dataclass(frozen=True)
class Trees:
    """The blocks of one micro-batch and the slot of every node."""

    blocks: list[TreeBlock]
    scatter: Tensor

    @cached_property
    def in_order(self) -> bool:
        """Whether the packed nodes of all blocks, one block after the other, are the nodes of the micro-batch."""
        end = 0
        for block in self.blocks:
            nodes = block.packed.nodes if block.packed is not None else None
            if not isinstance(nodes, slice) or nodes.start != end:
                return False
            end = nodes.stop
        return end == len(self.scatter)


def to_trees(batch: MicroBatch, device: torch.device) -> Trees:
    """Return the indices and masks of `batch` on `device`."""
    arrays = [batch.scatter]
    first_slot = 0
    chains: list[Array] = []
    """The nodes of every packed block."""
    for block in batch.blocks:
        arrays += [block.gather, batch.depths[block.gather].reshape(block.rows, -1)]
        if block.end is not None:
            arrays.append(block.end)
        elif packs(device):
            nodes, slots, bounds = _packed(batch, first_slot, block)
            arrays += [nodes, slots, bounds]
            chains.append(nodes)
        first_slot += block.rows * block.longest
    scatter, *others = to_device(arrays, device)
    moved = iter(others)
    blocks: list[TreeBlock] = []
    for block in batch.blocks:
        gather, depths = next(moved), next(moved)
        mask: Tensor | None = None
        packed: PackedChains | None = None
        if block.end is not None:
            slot_L = torch.arange(block.longest, device=device)
            mask = ((slot_L[None, :, None] >= slot_L) & (slot_L[None, :, None] < next(moved)[:, None, :]))[:, None]
        elif packs(device):
            on_device = next(moved)
            packed = PackedChains(_as_slice(chains.pop(0)) or on_device, slots=next(moved), bounds=next(moved))
        blocks.append(TreeBlock(block.rows, block.longest, gather, depths, mask, packed))
    return Trees(blocks, scatter)


def packs(device: torch.device) -> bool:
    """Return whether torch has attention for packed sequences on `device`. In torch 2.13, only NVIDIA's GPUs from
    compute capability 8.0 have it."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _packed(batch: MicroBatch, first_slot: int, block: AttentionBlock) -> list[Array]:
    """Return the arrays of `PackedChains`."""
    rows, longest = block.rows, block.longest
    # Nodes may be padded at the end (shared.megatron). These nodes share slot 0 with the first node, which is kept.
    slots, nodes = np.unique(batch.scatter, return_index=True)
    inside = (slots >= first_slot) & (slots < first_slot + rows * longest)
    slots, nodes = slots[inside] - first_slot, nodes[inside]
    bounds = np.append(0, np.cumsum(np.bincount(slots // longest, minlength=rows))).astype(np.int32)
    return [nodes, slots, bounds]


def _as_slice(nodes: Array) -> slice | None:
    """Return `nodes` as a slice, or None if they are not consecutive."""
    first, count = int(nodes[0]), len(nodes)
    return slice(first, first + count) if np.array_equal(nodes, np.arange(first, first + count)) else None


@contextmanager
def using(model: nn.Module, name: str) -> Iterator[None]:
    """Run `model` inside the block with the attention registered as `name`, and then restore its own attention."""
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def attend_trees(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trees: Trees,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Map `query` [1, H, N, D] and `key`, `value` [1, G, N, D] to [1, N, H, D]. Raises ValueError if an unsupported
    term is given."""
    if dropout or attention_mask is not None or any(others.get(name) is not None for name in UNKNOWN_TERMS):
        raise ValueError(f"{type(module).__name__}: no support for dropout, a custom mask or {UNKNOWN_TERMS}")
    heads, dim = query.shape[1], value.shape[3]
    # The gradient of a view costs nothing; that of an element or of a slice fills a tensor with zeros and copies.
    q_NHD, k_NGD, v_NGD = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    outputs: list[Tensor] = []
    flash = _suits_flash(query, value)
    in_order = flash and trees.in_order
    for block in trees.blocks:
        if flash and block.packed is not None:
            out_PHD = _attend_packed(q_NHD, k_NGD, v_NGD, block.longest, block.packed, scaling, sliding_window)
            outputs.append(out_PHD if in_order else _in_slots(out_PHD, block, block.packed))
            continue
        q, k, v = (in_rows(part, block.gather, block.rows) for part in (q_NHD, k_NGD, v_NGD))
        mask = block.mask
        if sliding_window is not None and block.longest > sliding_window:
            near = block.depths[:, None, :, None] - block.depths[:, None, None, :] < sliding_window
            mask = near & (torch.ones_like(near).tril() if mask is None else mask)
        out_RHLD = attend(q, k, v, mask, scaling)
        outputs.append(out_RHLD.transpose(1, 2).reshape(-1, heads * dim))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    nodes = joined if in_order else joined.index_select(0, trees.scatter)
    return nodes.view(1, -1, heads, dim), None


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Map `query` [R, H, L, D] and `key`, `value` [R, G, K, D] to [R, H, L, D]. Without a `mask`, attend causally."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and repeats_keys(query.device.type, flash=mask is None and _suits_flash(query, value)):
        key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        grouped = False
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def attend_at_end(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Map `query` [R, H, L, D] and `key`, `value` [R, G, K, D] to [R, H, L, D]. The queries belong to the last L of K
    positions and attend causally.

    Memory-saving kernels on a GPU need no mask for this. On a CPU, torch creates a float32 mask [L, K] and keeps it
    for the backward pass.
    """
    length, keys = query.shape[2], key.shape[2]
    return attend(query, key, value, None if length == keys else causal_lower_right(length, keys), scaling)


def _suits_flash(query: Tensor, value: Tensor) -> bool:
    dim = value.shape[3]
    return query.dtype in _FLASH_DTYPES and dim == query.shape[3] and dim <= _FLASH_DIM and dim % _FLASH_DIVISOR == 0


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    longest: int,
    packed: PackedChains,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Map the `query` [N, H, D] and `key`, `value` [N, G, D] of all nodes to [P, H, D] for those of a block whose
    longest row has `longest` slots. Nothing is computed for empty slots."""
    heads, groups = query.shape[1], key.shape[1]
    query, key, value = (_picked(part, packed.nodes) for part in (query, key, value))
    if heads != groups and not _SHARES_KEYS:
        key, value = (part.repeat_interleave(heads // groups, dim=1) for part in (key, value))
    kernel = partial(varlen_attn, enable_gqa=heads != groups) if _SHARES_KEYS else varlen_attn
    ends, left = packed.bounds, -1 if window is None else window - 1
    out: Any = kernel(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(left, 0))
    return cast(Tensor, out.contiguous())  # otherwise as strided as the queries


def _picked(nodes_NXD: Tensor, picked: Tensor | slice) -> Tensor:
    if not isinstance(picked, slice):
        return nodes_NXD.index_select(0, picked)
    return nodes_NXD if picked == slice(0, len(nodes_NXD)) else nodes_NXD[picked]


def _in_slots(out_PHD: Tensor, block: TreeBlock, packed: PackedChains) -> Tensor:
    """Return [R * L, H * D]. Empty slots are 0."""
    slots = out_PHD.new_zeros(block.rows * block.longest, out_PHD[0].numel())
    return slots.index_copy_(0, packed.slots, out_PHD.flatten(1))


def repeats_keys(device: str, *, flash: bool) -> bool:
    """Return whether key heads are repeated for the query heads that share them. Of torch's fused kernels for CUDA,
    only FlashAttention supports groups. `flash` is whether it accepts the inputs, which excludes float32 and masks. The
    unfused kernel stores the scores of all pairs."""
    return device == "cuda" and not flash


def in_rows(nodes_NHD: Tensor, gather: Tensor, rows: int) -> Tensor:
    """Map [N, H, D] to [R, H, L, D]. `gather` int64 [R * L] is the node in each slot."""
    heads, dim = nodes_NHD.shape[1:]
    picked = nodes_NHD.reshape(-1, heads * dim).index_select(0, gather)
    return picked.view(rows, -1, heads, dim).transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register(NAME, attend_trees)
