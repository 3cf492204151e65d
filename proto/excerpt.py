"""Builds the head of a block file that contains rows of other block files, from their tables alone.

A stream between hosts is such a file, so its reader checks it with the code that checks block files. This module uses
internals of `proto.blockfile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from proto import blockfile
from proto.blockfile import Table
from proto.tensors import Array

MAX_NAMED = 1 << 16
"""Maximum number of missing shards that are named. It is limited because a request may cover the product of two long
lists."""
_EMPTY = np.empty(0, np.int64)


class Picks(NamedTuple):
    """The tasks of an excerpt, as columns. `task_ids` and `fences` have one entry per task. Place i is task `tasks[i]`
    of table `files[i]` and has shards of pick `owners[i]`. The owners are in ascending order, and so are the files of
    each owner.
    """

    task_ids: list[str]
    fences: list[int]
    files: Sequence[int]
    tasks: Sequence[int]
    owners: Sequence[int]


@dataclass(frozen=True)
class Excerpt:
    """The header and table of a new file, in `head`, and its data: run i copies `lengths[i]` bytes of file `files[i]`
    from `sources[i]` to `targets[i]`. The targets are in ascending order; gaps between runs are zeros.
    """

    head: bytes
    covered: int
    total_bytes: int
    files: list[int]
    sources: list[int]
    targets: list[int]
    lengths: list[int]


def missing_keys(tables: Sequence[Table], picks: Picks, keys: Sequence[str]) -> list[str]:
    """Return the names `task_id#key` of the shards in `keys` that no table has, at most MAX_NAMED."""
    there: list[set[str]] = [set() for _ in picks.task_ids]
    for number, task, owner in zip(picks.files, picks.tasks, picks.owners, strict=True):
        there[owner].update(tables[number].checksums(task))
    names = (
        f"{task_id}#{key}"
        for task_id, present in zip(picks.task_ids, there, strict=True)
        for key in keys
        if key not in present
    )
    return list(islice(names, MAX_NAMED))


def make(tables: Sequence[Table], picks: Picks, keys: Sequence[str], max_bytes: int) -> Excerpt | None:
    """Return an excerpt with the shards `keys` of `picks`, or all their shards if `keys` is empty.

    The excerpt ends before the first task that would make it exceed `max_bytes`, but has at least one task. Returns
    None if a shard is missing (see `missing_keys`).
    """
    count = len(picks.task_ids)
    if not count:
        return None
    rows, dims, file_of, pick_of = _rows(tables, picks)
    names = list(keys) or list(dict.fromkeys(key for table in tables for key in table.keys))
    key_of = _key_numbers(tables, names, file_of, rows)
    if _in_order(key_of, pick_of, len(names), count):
        covered = _cut(rows, pick_of, count, max_bytes)
        kept: Array | slice = slice(0, covered * len(names))
    else:
        order = np.flatnonzero(key_of >= 0)
        if keys:
            order = order[np.lexsort((file_of[order], key_of[order], pick_of[order]))]
        # The shards of a key that was put twice have the same bytes: take the one in the first file.
        _, first = np.unique(pick_of[order] * len(names) + key_of[order], return_index=True)
        order = order[np.sort(first)]
        counts = np.bincount(pick_of[order], minlength=count)
        if (counts != len(keys)).any() if keys else (counts == 0).any():
            return None
        covered = _cut(rows[order], pick_of[order], count, max_bytes)
        kept = order[pick_of[order] < covered]
    dims = _dims(rows, dims, kept)
    return _assemble(picks, covered, names, rows[kept].copy(), dims, file_of[kept], pick_of[kept], key_of[kept])


def _spread(begins: Array, counts: Array) -> Array:
    """Concatenate the ranges `begins[i], begins[i] + 1, ...` of length `counts[i]`."""
    total = int(counts.sum())
    if not total:
        return _EMPTY
    ends = np.cumsum(counts)
    indices: Array = np.repeat(begins - (ends - counts), counts) + np.arange(total)
    return indices


def _rows(tables: Sequence[Table], picks: Picks) -> tuple[Array, Array, Array, Array]:
    """Return the concatenated rows of all places, their dimensions, and the file and the pick of each row."""
    files, tasks = np.array(picks.files, np.int64), np.array(picks.tasks, np.int64)
    # Consecutive tasks of a file, the usual case, are handled together.
    breaks = np.flatnonzero((np.diff(files) != 0) | (np.diff(tasks) != 1)) + 1
    heads, tails = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(files)])) - 1
    numbers = files[heads]
    rows, dims, begins, ends = [], [], [], []
    for number, first, last in zip(numbers.tolist(), tasks[heads].tolist(), tasks[tails].tolist(), strict=True):
        table = tables[number]
        begin, end = int(table._starts[first]), int(table._starts[last + 1])
        rows.append(table._rows[begin:end])
        dims.append(table._dims[int(table._dims_starts[begin]) :][: int(rows[-1]["ndim"].sum(dtype=np.int64))])
        begins.append(table._starts[first : last + 1])
        ends.append(table._starts[first + 1 : last + 2])
    counts = np.concatenate(ends) - np.concatenate(begins)
    file_of = np.repeat(numbers, [len(part) for part in rows])
    return np.concatenate(rows), np.concatenate(dims), file_of, np.repeat(np.array(picks.owners, np.int64), counts)


def _key_numbers(tables: Sequence[Table], names: Sequence[str], file_of: Array, rows: Array) -> Array:
    """Return the index of each row's key in `names`, or -1 if `names` lacks the key."""
    place = {name: at for at, name in enumerate(names)}
    translate = np.full((len(tables), max(len(table.keys) for table in tables)), -1, np.int64)
    for number, table in enumerate(tables):
        translate[number, : len(table.keys)] = [place.get(key, -1) for key in table.keys]
    keys: Array = translate[file_of, rows["key"]]
    return keys


def _in_order(key_of: Array, pick_of: Array, names: int, count: int) -> bool:
    """Return whether every pick has each key once, and all keys are in the requested order."""
    return len(key_of) == names * count and bool(
        (key_of.reshape(-1, names) == np.arange(names)).all()
        and (pick_of.reshape(-1, names) == np.arange(count)[:, None]).all()
    )


def _dims(rows: Array, dims: Array, kept: Array | slice) -> Array:
    """Return the dimensions of the kept rows, in order."""
    ndim = rows["ndim"].astype(np.int64)
    begins = np.cumsum(ndim) - ndim
    of_rows: Array = dims[_spread(begins[kept], ndim[kept])]
    return of_rows


def _cut(rows: Array, pick_of: Array, picks: int, max_bytes: int) -> int:
    """Return the number of picks that fit, at least 1."""
    by_pick = np.cumsum(np.bincount(pick_of, weights=rows["nbytes"].astype(np.float64), minlength=picks))
    return max(1, int(np.searchsorted(by_pick, max_bytes, side="right")))


def _assemble(
    picks: Picks,
    covered: int,
    names: list[str],
    rows: Array,
    dims: Array,
    file_of: Array,
    pick_of: Array,
    key_of: Array,
) -> Excerpt:
    is_used = np.bincount(key_of, minlength=len(names)) > 0
    used = np.flatnonzero(is_used)
    rows["key"] = (np.cumsum(is_used) - 1)[key_of]
    counts = np.bincount(pick_of, minlength=covered)
    sources = rows["offset"].astype(np.int64)
    keys = [names[number] for number in used.tolist()]
    head = blockfile.FileHead(picks.task_ids[:covered], picks.fences[:covered], counts, keys, rows, dims)
    return Excerpt(head.pack(), covered, head.file_bytes, *_runs(file_of, sources, rows))


def _runs(file_of: Array, sources: Array, rows: Array) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the files, sources, targets and lengths of the runs, as in `Excerpt`.

    Consecutive rows of a file share a run if the distance between source and target is the same.
    """
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
