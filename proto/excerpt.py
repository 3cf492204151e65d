"""The head of a block file that holds some rows of others, made from their tables alone. It never touches data.

The other half of `proto.blockfile`, whose internals it shares: a stream between hosts is such a file, so that its
reader checks it with the code that checks files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from proto import blockfile
from proto.blockfile import HEADER_BYTES, Table
from proto.tensors import Array

_EMPTY = np.empty(0, np.int64)


class Pick(NamedTuple):
    """One task to take: its index in each table (by number) that holds shards of it; earlier tables come first."""

    task_id: str
    fence: int
    places: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Excerpt:
    """`head`: header and table of the new file. Run i copies `lengths[i]` bytes of file `files[i]` from `sources[i]`
    to `targets[i]`; targets ascend, gaps between runs are zeros.
    """

    head: bytes
    covered: int
    total_bytes: int
    files: list[int]
    sources: list[int]
    targets: list[int]
    lengths: list[int]


def missing_keys(tables: Sequence[Table], picks: Sequence[Pick], keys: Sequence[str]) -> list[str]:
    """`task_id#key` of every shard of `keys` that no table has."""
    lacking: list[str] = []
    for pick in picks:
        there = {key for number, task in pick.places for key in tables[number].checksums(task)}
        lacking.extend(f"{pick.task_id}#{key}" for key in keys if key not in there)
    return lacking


def make(tables: Sequence[Table], picks: Sequence[Pick], keys: Sequence[str], max_bytes: int) -> Excerpt | None:
    """The excerpt with the shards `keys` (none: all) of `picks`, cut before the task that would pass `max_bytes`.

    None: a shard is missing (`missing_keys` says which). The first task is always taken.
    """
    if not picks:
        return None
    file_of, row_of, pick_of = _rows(tables, picks)
    names = list(keys) or list(dict.fromkeys(key for table in tables for key in table.keys))
    key_of = _key_numbers(tables, names, file_of, row_of)
    order = np.flatnonzero(key_of >= 0)
    if keys:
        order = order[np.lexsort((file_of[order], key_of[order], pick_of[order]))]
    # a key that was put twice has the same bytes: the first file will do
    _, first = np.unique(pick_of[order] * len(names) + key_of[order], return_index=True)
    order = order[np.sort(first)]
    counts = np.bincount(pick_of[order], minlength=len(picks))
    if (counts != len(keys)).any() if keys else (counts == 0).any():
        return None
    rows = _take(tables, file_of[order], row_of[order])
    covered = _cut(rows, pick_of[order], len(picks), max_bytes)
    kept = np.flatnonzero(pick_of[order] < covered)
    order = order[kept]
    return _assemble(
        tables, picks[:covered], names, file_of[order], row_of[order], rows[kept], key_of[order], counts[:covered]
    )


def rows_of(table: Table) -> tuple[list[int], list[int], list[int]]:
    """Begins, ends and checksums of all rows of a table, in order."""
    rows = table._rows
    return rows["offset"].tolist(), (rows["offset"] + rows["nbytes"]).tolist(), rows["checksum"].tolist()


def _spread(begins: Array, counts: Array) -> Array:
    """`begins[i], begins[i] + 1, ...` (`counts[i]` of them) for every i, one after the other."""
    total = int(counts.sum())
    if not total:
        return _EMPTY
    ends = np.cumsum(counts)
    indices: Array = np.repeat(begins - (ends - counts), counts) + np.arange(total)
    return indices


def _rows(tables: Sequence[Table], picks: Sequence[Pick]) -> tuple[Array, Array, Array]:
    """File, row and pick of every row of the picked tasks."""
    places = [place for pick in picks for place in pick.places]
    numbers, tasks = np.array(places, np.int64).reshape(-1, 2).T
    owner = np.repeat(np.arange(len(picks)), [len(pick.places) for pick in picks])
    begins, counts = np.empty(len(places), np.int64), np.empty(len(places), np.int64)
    for number, mine in _by_file(numbers):
        starts = tables[number]._starts
        begins[mine] = starts[tasks[mine]]
        counts[mine] = starts[tasks[mine] + 1] - begins[mine]
    return np.repeat(numbers, counts), _spread(begins, counts), np.repeat(owner, counts)


def _key_numbers(tables: Sequence[Table], names: Sequence[str], file_of: Array, row_of: Array) -> Array:
    """Place of each row's key in `names`, -1 for others."""
    place = {name: at for at, name in enumerate(names)}
    found = np.full(len(row_of), -1, np.int64)
    for number, mine in _by_file(file_of):
        translate = np.array([place.get(key, -1) for key in tables[number].keys], np.int64)
        found[mine] = translate[tables[number]._rows["key"][row_of[mine]]]
    return found


def _take(tables: Sequence[Table], file_of: Array, row_of: Array) -> Array:
    rows: Array = np.empty(len(row_of), blockfile._ROW)
    for number, mine in _by_file(file_of):
        rows[mine] = tables[number]._rows[row_of[mine]]
    return rows


def _by_file(file_of: Array) -> list[tuple[int, slice | Array]]:
    """Each file and where it stands; as slices when the files come one after the other, as they mostly do."""
    begins = np.concatenate(([0], np.flatnonzero(np.diff(file_of)) + 1, [len(file_of)])).tolist()
    numbers = file_of[begins[:-1]].tolist() if len(file_of) else []
    if len(set(numbers)) == len(numbers):
        return [(number, slice(*each)) for number, each in zip(numbers, pairwise(begins), strict=True)]
    return [(number, np.flatnonzero(file_of == number)) for number in dict.fromkeys(numbers)]


def _cut(rows: Array, pick_of: Array, picks: int, max_bytes: int) -> int:
    """How many picks fit."""
    by_pick = np.cumsum(np.bincount(pick_of, weights=rows["nbytes"].astype(np.float64), minlength=picks))
    return max(1, int(np.searchsorted(by_pick, max_bytes, side="right")))


def _assemble(
    tables: Sequence[Table],
    picks: Sequence[Pick],
    names: list[str],
    file_of: Array,
    row_of: Array,
    rows: Array,
    key_of: Array,
    counts: Array,
) -> Excerpt:
    dims = np.empty(int(rows["ndim"].sum(dtype=np.int64)), blockfile._U64)
    ends = np.cumsum(rows["ndim"], dtype=np.int64)
    for number, mine in _by_file(file_of):
        ndim = rows["ndim"][mine].astype(np.int64)
        source = _spread(tables[number]._dims_starts[row_of[mine]], ndim)
        dims[_spread(ends[mine] - ndim, ndim)] = tables[number]._dims[source]
    used, rows["key"] = np.unique(key_of, return_inverse=True)
    fences = np.array([pick.fence for pick in picks], blockfile._U64)
    task_names = "\n".join([pick.task_id for pick in picks]).encode()
    key_names = "\n".join([names[number] for number in used.tolist()]).encode()
    sources = rows["offset"].astype(np.int64)
    table_bytes = 12 * len(picks) + 8 * len(dims) + rows.nbytes + len(task_names) + len(key_names)
    rows["offset"], total = blockfile._canonical(rows["nbytes"], HEADER_BYTES + table_bytes)
    table = b"".join(
        (
            fences.tobytes(),
            dims.tobytes(),
            rows.tobytes(),
            counts.astype(blockfile._U32).tobytes(),
            task_names,
            key_names,
        )
    )
    head = blockfile._HEADER.pack(
        blockfile.MAGIC,
        blockfile.LAYOUT,
        0,
        len(picks),
        len(used),
        len(rows),
        len(dims),
        len(task_names),
        len(key_names),
        total,
        xxhash.xxh3_64_intdigest(table),
        0,
    )
    head += blockfile._CHECK.pack(xxhash.xxh3_64_intdigest(head)) + table
    return Excerpt(head, len(picks), total, *_runs(file_of, sources, rows))


def _runs(file_of: Array, sources: Array, rows: Array) -> tuple[list[int], list[int], list[int], list[int]]:
    """Files, sources, targets and lengths; rows that keep their distance in both files go in one run."""
    full = np.flatnonzero(rows["nbytes"])
    if not len(full):
        return [], [], [], []
    file_of, sources, sizes = file_of[full], sources[full], rows["nbytes"][full].astype(np.int64)
    targets = rows["offset"][full].astype(np.int64)
    shift = sources - targets
    begins = np.concatenate(([0], np.flatnonzero((np.diff(shift) != 0) | (np.diff(file_of) != 0)) + 1))
    lasts = np.concatenate((begins[1:], [len(full)])) - 1
    lengths = targets[lasts] + sizes[lasts] - targets[begins]
    return file_of[begins].tolist(), sources[begins].tolist(), targets[begins].tolist(), lengths.tolist()
