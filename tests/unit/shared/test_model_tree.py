"""In a tree of shared prefixes, every token has a node, and every node attends to exactly its own prefix."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model import attention, tree
from shared.model.logprobs import TokenScorer
from shared.model.tree import Array, MicroBatch
from tests.unit.tiny_models import make_model

sequences = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=7), min_size=1, max_size=12)


def flat(rows: list[list[int]]) -> tuple[Array, Array, Array]:
    mask = [0 if position == 0 else 1 for row in rows for position in range(len(row))]
    return (
        np.concatenate(rows).astype(np.int32),
        np.array([len(row) for row in rows], np.int32),
        np.array(mask, np.uint8),
    )


def visible(batch: MicroBatch) -> list[list[int]]:
    """Return, for each node, the tokens that it may attend to, in order of depth."""
    result: list[list[int]] = [[] for _ in batch.token_ids]
    slot_of_block = 0
    for block in batch.blocks:
        gather = block.gather.reshape(block.rows, block.longest)
        for row in range(block.rows):
            for slot in range(block.longest):
                node = int(gather[row, slot])
                if batch.scatter[node] != slot_of_block + row * block.longest + slot:
                    continue  # This is padding.
                seen = [
                    int(gather[row, other])
                    for other in range(slot + 1)
                    if block.end is None or slot < block.end[row, other]
                ]
                seen.sort(key=lambda each: int(batch.depths[each]))
                result[node] = [int(batch.token_ids[each]) for each in seen]
        slot_of_block += block.rows * block.longest
    return result


@given(sequences, st.integers(1, 40), st.booleans(), st.booleans())
def test_every_masked_token_is_predicted_from_exactly_its_prefix(
    rows: list[list[int]], max_tokens: int, share: bool, packs: bool
) -> None:
    ids, lengths, mask = flat(rows)
    found: dict[int, tuple[list[int], int]] = {}
    for batch in tree.plan(ids, lengths, mask, max_tokens=max_tokens, hidden_size=8, share=share, packs=packs):
        seen = visible(batch)
        for token, child in zip(batch.tokens.tolist(), batch.token_child.tolist(), strict=True):
            predictor = int(batch.predictors[batch.child_predictor[child]])
            found[token] = (seen[predictor], int(batch.child_token[child]))
    at = 0
    for row in rows:
        for position in range(1, len(row)):
            assert found.pop(at + position) == (row[:position], row[position])
        at += len(row)
    assert not found


@given(sequences)
def test_a_common_prefix_is_one_path(rows: list[list[int]]) -> None:
    ids, lengths, mask = flat(rows)
    (batch,) = tree.plan(ids, lengths, mask, max_tokens=1000, hidden_size=10**6)
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row))}
    assert len(batch.token_ids) == len(prefixes)


@given(sequences, st.booleans())
def test_chains_and_rows_with_branches_are_never_in_one_block(rows: list[list[int]], packs: bool) -> None:
    for batch in tree.plan(*flat(rows), max_tokens=1000, hidden_size=64, packs=packs):
        for block in (each for each in batch.blocks if each.end is not None):
            assert all(len(set(end.tolist())) > 1 for end in block.end)
            assert all(end.max() > end[0] or end.min() < end[0] for end in block.end)


def test_sequences_that_continue_one_another_are_one_chain() -> None:
    rows = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4, 5, 6, 7]]
    for packs in (False, True):
        (batch,) = tree.plan(*flat(rows), max_tokens=1000, hidden_size=64, packs=packs)
        assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert [block.end for block in batch.blocks] == [None]


def groups_of_answers() -> tuple[Array, Array, Array]:
    """Return 16 groups of 8 answers of 64 to 512 tokens. Each group has its own prompt of 200 tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(16):
        prompt = rng.integers(0, 150_000, 200).tolist()
        rows += [prompt + rng.integers(0, 150_000, rng.integers(64, 513)).tolist() for _ in range(8)]
    return flat(rows)


@pytest.mark.parametrize(("hidden_size", "share"), [(1024, 0.95), (3584, 0.75)])
def test_on_a_device_that_packs_chains_most_answers_to_a_prompt_are_chains(hidden_size: int, share: float) -> None:
    def in_chains(*, packs: bool) -> float:
        found = tree.plan(*groups_of_answers(), max_tokens=16_384, hidden_size=hidden_size, packs=packs)
        slots = {True: 0, False: 0}
        for block in (block for batch in found for block in batch.blocks):
            slots[block.end is None] += block.rows * block.longest
        return slots[True] / sum(slots.values())

    assert in_chains(packs=True) > share
    assert in_chains(packs=False) < 0.15


def test_on_a_device_that_packs_chains_a_long_prompt_is_still_shared_by_short_answers() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 150_000, 1500).tolist()
    rows = [prompt + rng.integers(0, 150_000, 8).tolist() for _ in range(8)]
    (batch,) = tree.plan(*flat(rows), max_tokens=16_384, hidden_size=3584, packs=True)
    assert len(batch.token_ids) == 1500 + 8 * 7


def test_the_scorer_plans_for_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = TokenScorer(make_model("qwen3", head_dim=16))
    prompt = list(range(10))
    rows = [prompt + [10 + number] * 12 for number in range(4)]
    plans = []
    for packs in (False, True):
        monkeypatch.setattr(attention, "packs", lambda device, packs=packs: packs)
        plans.append(scorer.plan(*flat(rows), 1.0, 100)[0])
    assert len(plans[0].token_ids) < len(plans[1].token_ids)


def test_micro_batches_respect_the_limit_unless_one_sequence_is_longer() -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, size=size).tolist() for size in (5, 9, 30, 7, 12, 3)]
    ids, lengths, mask = flat(rows)
    sizes = [len(batch.token_ids) for batch in tree.plan(ids, lengths, mask, max_tokens=20, hidden_size=8, share=False)]
    assert sum(sizes) == len(ids) - len(rows)
    assert [size for size in sizes if size > 20] == [29]


@given(sequences, st.data(), st.booleans())
def test_only_prefixes_of_scored_tokens_are_computed(rows: list[list[int]], data: st.DataObject, share: bool) -> None:
    masks = [[0, *data.draw(st.lists(st.booleans(), min_size=len(row) - 1, max_size=len(row) - 1))] for row in rows]
    ids, lengths, _ = flat(rows)
    mask = np.concatenate(masks).astype(np.uint8)
    batches = tree.plan(ids, lengths, mask, max_tokens=1000, hidden_size=10**6, share=share)
    scored = [max((i for i, one in enumerate(each) if one), default=0) for each in masks]
    prefixes = [tuple(row[:end]) for row, last in zip(rows, scored, strict=True) for end in range(1, last + 1)]
    assert sum(len(batch.token_ids) for batch in batches) == len(set(prefixes) if share else prefixes)
    assert sorted(token for batch in batches for token in batch.tokens.tolist()) == np.flatnonzero(mask).tolist()


@given(sequences, st.integers(7, 30))
def test_shared_prefixes_never_make_a_micro_batch_too_large(rows: list[list[int]], max_tokens: int) -> None:
    for batch in tree.plan(*flat(rows), max_tokens=max_tokens, hidden_size=10**6):
        assert len(batch.token_ids) <= max_tokens


def test_a_mask_on_the_first_token_is_refused() -> None:
    with pytest.raises(ValueError, match="first token"):
        tree.plan(np.array([1, 2, 3]), np.array([1, 2]), np.array([0, 1, 1]), max_tokens=9, hidden_size=8)


def test_arrays_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="must agree"):
        tree.plan(np.array([1, 2, 3]), np.array([2]), np.array([0, 1, 1]), max_tokens=9, hidden_size=8)
