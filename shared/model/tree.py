"""Lays ragged sequences out as trees of shared prefixes, so that common tokens are computed once, and tokens after the
last scored one are not computed at all. It does not import torch.

The samples of a group share their prompt and often much of their answer, and a causal model gives equal prefixes equal
hidden states. Sorted sequences form a trie in pre-order: a row of nodes, in which node j is an ancestor of node i if
and only if j <= i < end[j]. A row without branches is a plain causal chain. In the tree, a sequence ends before
its last scored token, which is a target but not a node; the tokens after it are neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MAX_ROW_NODES = 2048
"""Maximum number of nodes of a row with branches. The size of the row's attention mask is the square of its number of
nodes."""
MASKED_PAIR = 16
"""Time that an element of the attention mask costs on a device that computes chains in packed form, compared with a
pair of a chain. It is an estimate, which has not been measured. FlashAttention-2, which computes chains, is about twice
as fast as FlashAttention (arXiv 2307.08691, abstract), and the memory-efficient kernel, which a mask needs, is assumed
to be as fast as the latter. Chains skip the half of the pairs that a causal mask hides. Converting and reading the mask
and repeating the keys in every layer is assumed to double the time. The result, 8, is doubled, because a row that is
wrongly left apart costs less than one that is wrongly joined, which also needs memory for its mask."""
MIN_FILL = 0.8
"""Minimum fill of an attention block. It limits the padding, which only attention needs."""


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of similar length that attend in one call: R rows, of which the longest has L nodes. Either all of them are
    chains or none is.

    `gather` int64 [R*L] is the node of the micro-batch in each slot (padding repeats node 0). `end` int64 [R, L] is one
    past the last descendant of the slot's node, counted in slots, or None if the rows are chains.
    """

    rows: int
    longest: int
    gather: Array
    end: Array | None


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: N nodes, of which P predict C children, which are the targets of M tokens. A child
    is a node together with a token that follows it.

    `token_ids` and `depths` int64 [N] describe the nodes, and `scatter` int64 [N] is a node's slot among the slots of
    all `blocks`. `predictors` int64 [P] are the nodes whose logits are needed. For each child, `child_predictor` int64
    [C], which ascends, is an index into `predictors`, and `child_token` int64 [C] is the token scored there. `tokens`
    int64 [M] are the positions of the scored tokens in the caller's flat [T] arrays, and `token_child` int64 [M] is the
    child of each. `input_tokens` int64 [K] are the positions of all tokens that are nodes, several of which may be one,
    and `input_nodes` int64 [K] are their nodes.
    """

    token_ids: Array
    depths: Array
    blocks: list[AttentionBlock]
    scatter: Array
    predictors: Array
    child_predictor: Array
    child_token: Array
    tokens: Array
    token_child: Array
    input_tokens: Array
    input_nodes: Array


@dataclass(frozen=True)
class _Forest:
    """All rows of a batch. Nodes are numbered row by row, and in pre-order within a row."""

    node_token: Array  # [N]
    node_depth: Array  # [N]
    node_end: Array  # [N] one past the last descendant, as a node number
    row_start: Array  # [R + 1]
    row_is_chain: Array  # [R]
    token_node: Array  # [T] the node of every token


@dataclass(frozen=True)
class GivenTargets:
    """Tokens to score, each after any token of a batch: the position of that token in the flat arrays, and the id of
    the token that is scored there; int [M] each. A token may be followed by several targets or none."""

    predictor: Array
    token: Array


@dataclass(frozen=True)
class _Targets:
    """The scored tokens of a batch: their positions, the nodes that predict them, and their ids; int64 [M] each."""

    position: Array
    predictor: Array
    token: Array
    node_of: Array
    """The node of each token of the batch, or -1."""


def plan(
    token_ids: Array,
    lengths: Array,
    loss_mask: Array,
    *,
    max_tokens: int,
    hidden_size: int,
    share: bool = True,
    whole: bool = False,
    packs: bool = False,
    targets: GivenTargets | None = None,
    routes: Array | None = None,
) -> list[MicroBatch]:
    """Return micro-batches that score each token with mask 1 exactly once, or each of the `targets` if they are given.

    With `targets`, the mask is ignored, and `MicroBatch.tokens` are positions in the arrays of the targets.

    A micro-batch has at most `max_tokens` nodes, unless it holds one longer sequence. `token_ids` is int [T], `lengths`
    int [S] with sum T, `loss_mask` [T] of 0 and 1. `hidden_size` determines the relative costs of attention and linear
    layers, which decide how rows are formed. Without `share`, every sequence is a row of its own. With `whole`, the
    tokens after the last scored one are nodes, too, because the model's result depends on the length. `packs` says that
    the device computes chains in packed form (`attention.packs`), in which they cost much less than rows with branches.
    `routes` uint8 [T, W] are the experts that each token must use; tokens with different ones are different nodes.
    Raises ValueError if the sizes of the arrays differ or the first token of a sequence is to be scored.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    tokens = np.asarray(token_ids, dtype=np.int64)
    mask = np.asarray(loss_mask) != 0
    starts = np.cumsum(lengths) - lengths
    if len(tokens) != lengths.sum() or len(mask) != len(tokens) or (lengths <= 0).any():
        raise ValueError(
            f"{len(tokens)} token ids, {len(mask)} mask entries, lengths sum to {lengths.sum()}: they must agree, "
            "and no sequence may be empty"
        )
    if targets is None:
        if mask[starts].any():
            first = int(np.flatnonzero(mask[starts])[0])
            raise ValueError(f"sequence {first}: loss_mask is 1 at its first token, which nothing predicts; mask it")
        scored = np.flatnonzero(mask)
        targets = GivenTargets(scored - 1, tokens[scored])
    else:
        scored = np.arange(len(targets.token))
    if not len(scored):
        return []
    position = np.arange(len(tokens)) - np.repeat(starts, lengths)
    predicts = np.zeros(len(tokens), dtype=np.bool_)
    predicts[targets.predictor] = True
    needed = np.maximum.reduceat(np.where(predicts, position + 1, 0), starts)  # nodes of each sequence
    if whole:
        needed = np.where(needed > 0, lengths, 0)
    is_node = position < np.repeat(needed, lengths)
    most = min(MAX_ROW_NODES, max_tokens)
    masked_pair = MASKED_PAIR if packs else 1
    kinds = tokens if routes is None else _kinds(tokens, routes)
    forest = _grow(tokens[is_node], kinds[is_node], needed[needed > 0], most, hidden_size, masked_pair, share=share)
    token_node = np.full(len(tokens), -1, dtype=np.int64)
    token_node[is_node] = forest.token_node
    of_nodes = _Targets(scored, token_node[targets.predictor], np.asarray(targets.token, dtype=np.int64), token_node)
    return [_micro_batch(forest, rows, of_nodes) for rows in _split_rows(forest, max_tokens)]


def unscored() -> MicroBatch:
    """Return a micro-batch of one node that scores no token, for a rank that has nothing to do while others do."""
    none = np.zeros(0, np.int64)
    [batch] = plan(np.zeros(2), np.array([2]), np.array([0, 1]), max_tokens=1, hidden_size=1)
    return replace(batch, predictors=none, child_predictor=none, child_token=none, tokens=none, token_child=none)


def head_blocks(batch: MicroBatch, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of at most `most` predictors, each with the range of its children. They are computed without the
    device, which the host would otherwise have to wait for."""
    bounds = np.append(np.arange(0, len(batch.predictors), most), len(batch.predictors))
    children = np.searchsorted(batch.child_predictor, bounds)
    for rows, mine in zip(pairwise(bounds.tolist()), pairwise(children.tolist()), strict=True):
        yield slice(*rows), slice(*mine)


def _kinds(tokens: Array, routes: Array) -> Array:
    """Return a number for each token, int64 [T], that is the same for tokens with the same id and the same routes. The
    order of the numbers is that of the ids."""
    rows = np.concatenate([tokens.astype(">u4")[:, None].view(np.uint8), routes], axis=1)
    whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1])))[:, 0]
    numbers: Array = np.unique(whole, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return numbers


def _grow(
    tokens: Array, kinds: Array, lengths: Array, max_nodes: int, hidden_size: int, masked_pair: int, *, share: bool
) -> _Forest:
    """Tokens of the same place may be one node if their `kinds` are equal."""
    starts = np.cumsum(lengths) - lengths
    count, width = len(lengths), int(lengths.max())
    if share:
        table = np.full((count, width), -1, dtype=np.int64)
        inside = np.arange(width) < lengths[:, None]
        table[inside] = kinds
        big_endian = (table + 1).astype(">u4")
        order = np.argsort(big_endian.view(f"S{4 * width}").ravel(), kind="stable")
        differs = table[order[1:]] != table[order[:-1]]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        # Padding (-1) differs from every token, so `common` is at most the shorter length, unless the rows are equal.
        common = np.minimum(common, np.minimum(lengths[order[1:]], lengths[order[:-1]]))
        shared = _cut_rows(np.concatenate([[0], common]), lengths[order], max_nodes, hidden_size, masked_pair)
    else:
        order = np.arange(count)
        shared = np.full(count, -1, dtype=np.int64)
    return _build(tokens, lengths, starts, order, shared)


def _cut_rows(common: Array, lengths: Array, max_nodes: int, hidden_size: int, masked_pair: int) -> Array:
    """Return the number of leading tokens that each sorted sequence shares with its row, or -1 where a row begins.

    A token in the linear layers costs about as much as 6 * hidden_size attention pairs (24 h^2 and 4 h multiply-adds
    per layer). This ratio decides whether joining a row saves time. A row of n nodes has n^2 pairs, each of which costs
    `masked_pair` if the row has branches, and 1 otherwise. All sequences that could join at a row's first branch share
    the cost of turning the chain into a row with branches.
    """
    shared = np.full(len(lengths), -1, dtype=np.int64)
    nodes, pair = 0, 1
    sequences = zip(common.tolist(), lengths.tolist(), _followers(common).tolist(), strict=True)
    for index, (same, length, followers) in enumerate(sequences):
        new = length - same
        joined = masked_pair if new and same < nodes else pair
        added = joined * ((nodes + new) ** 2 - nodes**2) - new**2 + (joined - pair) * nodes**2 / followers
        if same and nodes + new <= max_nodes and same * 6 * hidden_size >= added:
            shared[index] = same
            nodes, pair = nodes + new, joined
        else:
            nodes, pair = length, 1
    return shared


def _followers(common: Array) -> Array:
    """Return, for each sorted sequence, the number of sequences from it on that share at least as much with the one
    before them. `common` is the number of leading tokens that each shares with the one before it."""
    counts = np.ones(len(common), dtype=np.int64)
    for index in range(len(common) - 2, -1, -1):
        while (after := index + counts[index]) < len(common) and common[after] >= common[index]:
            counts[index] += counts[after]
    return counts


def _build(tokens: Array, lengths: Array, starts: Array, order: Array, shared: Array) -> _Forest:
    """Number the nodes sequence by sequence in sorted order, which is pre-order."""
    kept = np.maximum(shared, 0)
    fresh = lengths[order] - kept
    first_node = np.cumsum(fresh) - fresh  # first node of each sorted sequence
    total = int(fresh.sum())
    owner = np.repeat(np.arange(len(order)), fresh)
    node_depth = np.arange(total) - first_node[owner] + kept[owner]
    node_token = tokens[starts[order][owner] + node_depth]

    row_begins = np.flatnonzero(shared < 0)
    row_start = np.append(first_node[row_begins], total)
    node_end = np.repeat(row_start[1:], np.diff(row_start))
    token_node = np.empty(len(tokens), dtype=np.int64)

    path: list[int] = []  # node ids of the previous sequence, root first
    for index, (begin, length, same, node) in enumerate(
        zip(starts[order].tolist(), lengths[order].tolist(), shared.tolist(), first_node.tolist(), strict=True)
    ):
        if same < 0:
            path = []
        elif same < len(path):
            node_end[path[same:]] = node
        del path[max(same, 0) :]
        path.extend(range(node, node + int(fresh[index])))
        token_node[begin : begin + length] = path
    row_is_chain = np.minimum.reduceat(node_end, row_start[:-1]) == row_start[1:]
    return _Forest(node_token, node_depth, node_end, row_start, row_is_chain, token_node)


def _split_rows(forest: _Forest, max_tokens: int) -> list[Array]:
    """Return the rows of each micro-batch: those with branches before the chains, and the longest of each first."""
    sizes = np.diff(forest.row_start)
    parts: list[Array] = []
    current: list[int] = []
    nodes = 0
    for row in np.lexsort((forest.row_is_chain, -sizes)).tolist():
        if current and nodes + int(sizes[row]) > max_tokens:
            parts.append(np.array(current))
            current, nodes = [], 0
        current.append(row)
        nodes += int(sizes[row])
    parts.append(np.array(current))
    return [part[np.argsort(forest.row_is_chain[part], kind="stable")] for part in parts]


def _micro_batch(forest: _Forest, rows: Array, targets: _Targets) -> MicroBatch:
    sizes = np.diff(forest.row_start)[rows]
    first = np.cumsum(sizes) - sizes  # local number of each row's first node
    local = np.arange(int(sizes.sum()))
    row_of = np.repeat(np.arange(len(rows)), sizes)
    nodes = forest.row_start[rows][row_of] + local - first[row_of]
    to_local = np.full(len(forest.node_token), -1, dtype=np.int64)
    to_local[nodes] = local

    predictor = to_local[targets.predictor]
    chosen = np.flatnonzero(predictor >= 0)
    vocab = int(targets.token.max()) + 1
    inputs = np.flatnonzero(targets.node_of >= 0)
    input_nodes = to_local[targets.node_of[inputs]]
    children, token_child = np.unique(predictor[chosen] * vocab + targets.token[chosen], return_inverse=True)
    predictors, child_predictor = np.unique(children // vocab, return_inverse=True)

    blocks: list[AttentionBlock] = []
    scatter = np.empty(len(nodes), dtype=np.int64)
    slots = 0
    for begin, stop in _block_bounds(sizes, forest.row_is_chain[rows]):
        block = _block(forest, rows[begin:stop], sizes[begin:stop], first[begin:stop])
        inside = (row_of >= begin) & (row_of < stop)
        row = row_of[inside] - begin
        scatter[inside] = slots + row * block.longest + local[inside] - first[begin:stop][row]
        slots += block.rows * block.longest
        blocks.append(block)
    return MicroBatch(
        token_ids=forest.node_token[nodes],
        depths=forest.node_depth[nodes],
        blocks=blocks,
        scatter=scatter,
        predictors=predictors,
        child_predictor=child_predictor.reshape(-1),
        child_token=children % vocab,
        tokens=targets.position[chosen],
        token_child=token_child.reshape(-1),
        input_tokens=inputs[input_nodes >= 0],
        input_nodes=input_nodes[input_nodes >= 0],
    )


def _block_bounds(sizes: Array, is_chain: Array) -> list[tuple[int, int]]:
    """Split rows, which are in the order of `_split_rows`, into blocks. A new block begins with the first chain, and
    where the fill would fall below MIN_FILL."""
    bounds: list[tuple[int, int]] = []
    begin, used = 0, 0
    for index, size in enumerate(sizes.tolist()):
        longest = int(sizes[begin])
        sparse = (used + size) < MIN_FILL * longest * (index + 1 - begin)
        if index > begin and (sparse or is_chain[index] != is_chain[begin]):
            bounds.append((begin, index))
            begin, used = index, 0
        used += size
    return [*bounds, (begin, len(sizes))]


def _block(forest: _Forest, rows: Array, sizes: Array, first: Array) -> AttentionBlock:
    longest = int(sizes.max())
    slot = np.arange(longest)
    inside = slot < sizes[:, None]
    gather = np.where(inside, first[:, None] + slot, 0)
    end: Array | None = None
    if not forest.row_is_chain[rows[0]]:
        node = np.where(inside, forest.row_start[rows][:, None] + slot, 0)
        end = np.where(inside, forest.node_end[node] - forest.row_start[rows][:, None], slot + 1)
    return AttentionBlock(rows=len(rows), longest=longest, gather=gather.reshape(-1), end=end)
