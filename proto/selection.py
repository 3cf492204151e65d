"""Finds the shards of many tasks in a block file in one pass over its table, without reading data.

A call per shard would cost more than reading most shards. This module uses internals of `proto.blockfile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from proto.blockfile import _ITEMSIZES, Table
from proto.tensors import Array


class Selection(NamedTuple):
    """Rows of a table, grouped by task. Entry i of each array except `counts` describes row i."""

    counts: Array
    """Number of rows of each requested task, in the order of the request."""
    keys: Array
    """Indices of the keys in the table."""
    codes: Array
    first: Array
    """Start of the data, counted in elements of its type. It is a whole number, because item sizes divide 64 and
    offsets are multiples of 64."""
    end: Array
    shapes: dict[int, tuple[int, ...]]
    """Shape by row, for rows whose shape is not (end - first,)."""
    numbers: Array
    """Row numbers in the table."""

    def columns(self) -> int:
        """Return the number of rows per task if all tasks have the same keys and types, which is the usual case;
        otherwise return 0."""
        count = int(self.counts[0]) if len(self.counts) else 0
        alike = count > 0 and bool(
            (self.counts == count).all()
            and (self.keys.reshape(-1, count) == self.keys[:count]).all()
            and (self.codes.reshape(-1, count) == self.codes[:count]).all()
        )
        return count if alike else 0


def select(table: Table, tasks: Sequence[int], keys: Sequence[str] | None) -> Selection:
    """Return the shards named in `keys` that the tasks (given by index) have, in the order of `keys`.

    If `keys` is None, return all shards in file order.
    """
    where = np.asarray(tasks, np.int64)
    begins = table._starts[where]
    counts = table._starts[where + 1] - begins
    picked = _together(table, where, counts, keys)
    if picked is None:
        owner = np.repeat(np.arange(len(where)), counts)
        picked = np.arange(len(owner)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        if keys is not None:
            rank = _ranks(table, keys)[table._rows["key"][picked]]
            wanted = np.flatnonzero(rank >= 0)
            wanted = wanted[np.lexsort((rank[wanted], owner[wanted]))]
            picked = picked[wanted]
            counts = np.bincount(owner[wanted], minlength=len(where))
    numbers = np.arange(picked.start, picked.stop) if isinstance(picked, slice) else picked
    rows = table._rows[picked]
    sizes = _ITEMSIZES[rows["dtype"]]
    first = rows["offset"].astype(np.int64) // sizes
    end = first + rows["nbytes"].astype(np.int64) // sizes
    return Selection(counts, rows["key"], rows["dtype"], first, end, _shapes(table, picked, rows["ndim"]), numbers)


def placed(table: Table, numbers: Array) -> tuple[list[int], list[int], list[int]]:
    """Return the start offsets, end offsets and checksums of the rows with these numbers."""
    rows = table._rows[numbers]
    return rows["offset"].tolist(), (rows["offset"] + rows["nbytes"]).tolist(), rows["checksum"].tolist()


def named(table: Table, numbers: Array) -> list[str]:
    """Return the names `task_id#key` of the rows with these numbers."""
    owners = np.searchsorted(table._starts, numbers, side="right") - 1
    keys = table._rows["key"][numbers]
    return [f"{table.task_ids[task]}#{table.keys[key]}" for task, key in zip(owners, keys, strict=True)]


def _together(table: Table, where: Array, counts: Array, keys: Sequence[str] | None) -> slice | None:
    """Return the rows as a slice if the tasks are consecutive and have exactly `keys` in order, as in a stream."""
    if not len(where) or (np.diff(where) != 1).any():
        return None
    picked = slice(int(table._starts[where[0]]), int(table._starts[where[-1] + 1]))
    if keys is None:
        return picked
    if not len(keys) or (counts != len(keys)).any():
        return None
    ranks = _ranks(table, keys)[table._rows["key"][picked]].reshape(-1, len(keys))
    return picked if (ranks == np.arange(len(keys))).all() else None


def _ranks(table: Table, keys: Sequence[str]) -> Array:
    """Return, for each key of the table, its index in `keys`, or -1 if `keys` does not contain it."""
    place = {key: at for at, key in reversed(list(enumerate(keys)))}
    return np.array([place.get(key, -1) for key in table.keys], np.int64)


def _shapes(table: Table, picked: Array | slice, ndim: Array) -> dict[int, tuple[int, ...]]:
    odd = np.flatnonzero(ndim != 1)
    if not len(odd):
        return {}
    starts = table._dims_starts[picked][odd].tolist()
    dims = table._dims
    return {
        row: tuple(dims[start : start + n].tolist())
        for row, start, n in zip(odd.tolist(), starts, ndim[odd].tolist(), strict=True)
    }
