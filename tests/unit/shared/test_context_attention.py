"""With context parallelism, the parts of all ranks make up the attention of whole sequences, and no rank computes pairs
beyond the end of a chunk or before its window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias

from shared.model import attention, context, tree
from shared.model.context import ContextRank

LENGTHS = np.array([46, 41, 19])
HEADS, GROUPS, DIM = 4, 2, 8
NO_GROUP: Any = None
"""The process group of a rank. The test gathers the values itself."""


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1, 5, 30, 200])
def test_the_parts_of_all_ranks_equal_attention_over_whole_sequences(
    size: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    mask = np.ones(LENGTHS.sum() + len(LENGTHS), np.uint8)
    mask[np.cumsum(LENGTHS + 1) - LENGTHS - 1] = 0
    (batch,) = tree.plan(np.arange(len(mask)), LENGTHS + 1, mask, max_tokens=200, hidden_size=8, share=False)
    nodes = len(batch.token_ids)
    query, key, value = (torch.randn(1, each, nodes, DIM).double() for each in (HEADS, GROUPS, GROUPS))
    pairs: list[int] = []
    real = attention.attend

    def counted(query: Tensor, key: Tensor, value: Tensor, mask: Any, *others: Any) -> Tensor:
        pairs.append(query.shape[0] * query.shape[2] * key.shape[2])
        assert not isinstance(mask, Tensor) or isinstance(mask, CausalBias) or mask.dtype == torch.bool
        return real(query, key, value, mask, *others)

    trees = attention.to_trees(batch, torch.device("cpu"))
    whole, _ = attention.attend_trees(nn.Module(), query, key, value, None, trees=trees, sliding_window=window)
    monkeypatch.setattr(attention, "attend", counted)
    monkeypatch.setattr(context, "attend", counted)

    parts = [context.cut(batch, rank, size) for rank in range(size)]
    held = [_held(batch, part) for part in parts]
    cuts = [
        context.to_cut(part, ContextRank(rank, size, NO_GROUP), torch.device("cpu")) for rank, part in enumerate(parts)
    ]
    expected = 0
    for rank, (cut, mine) in enumerate(zip(cuts, held, strict=True)):
        everyone = [
            [
                context.in_rows(torch.cat([key, value], 3)[0][:, nodes_of].transpose(0, 1), block.gather, block.rows)
                for block in each.blocks
            ]
            for each, nodes_of in zip(cuts, held, strict=True)
        ]
        by_block = iter([torch.stack(block) for block in zip(*everyone, strict=True)])
        monkeypatch.setattr(context._Gather, "apply", lambda *_, made=by_block: next(made))
        found, _ = context.attend_cut(
            nn.Module(), query[:, :, mine], key[:, :, mine], value[:, :, mine], None, cut=cut, sliding_window=window
        )
        assert torch.allclose(found, whole[:, mine], atol=1e-12)
        for block, longest in zip(cut.blocks, parts[rank].longest, strict=True):
            chunk = longest // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                end = (number + 1) * chunk
                first = 0 if window is None else max(0, number * chunk - window + 1)
                expected += block.rows * chunk * (end - first)
    assert sorted(np.concatenate(held).tolist()) == list(range(nodes))
    assert sum(pairs) == expected


def _held(batch: tree.MicroBatch, part: context.CutBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the nodes of `batch` that `part` holds, in its order. Token ids are unique."""
    place = {token: node for node, token in enumerate(batch.token_ids.tolist())}
    return np.array([place[token] for token in part.batch.token_ids.tolist()])
