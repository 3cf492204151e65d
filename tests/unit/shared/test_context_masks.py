"""With context parallelism, a slot sees positions up to its own, within its window. A mask takes one byte a pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.model import context, tree
from shared.model.context import ContextRank


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slot_attends_to_earlier_positions_within_its_window(rank: int) -> None:
    lengths = np.array([23, 21, 9])
    mask = np.ones(lengths.sum(), np.uint8)
    mask[np.cumsum(lengths) - lengths] = 0
    (batch,) = tree.plan(np.arange(lengths.sum()), lengths, mask, max_tokens=100, hidden_size=8, share=False)
    part = context.cut(batch, rank, 2)
    group: torch.distributed.ProcessGroup = None  # type: ignore[assignment]  # no values are exchanged
    made = context.to_cut(part, ContextRank(rank, 2, group), torch.device("cpu"))
    assert len(made.blocks) > 1
    for block, longest in zip(made.blocks, part.longest, strict=True):
        own = context.local_slots(longest, rank, 2)
        every = np.concatenate([context.local_slots(longest, each, 2) for each in range(2)])
        distance = own[:, None] - every
        assert np.array_equal(block.mask.numpy(), distance >= 0)
        assert np.array_equal(block.near(5).numpy(), (distance >= 0) & (distance < 5))
        held = sum(each.nbytes for each in (block.mask, block.queries, block.keys))
        assert held == distance.size + 4 * (len(own) + len(every))
