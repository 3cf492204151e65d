"""Maps sealed block files copy-on-write and returns their shards as arrays. Files that have been collected cannot be
mapped.

Each fetch makes its own mapping, so a reader that writes to its arrays changes no others, even in its own process. The
lock taken here belongs to the open file description, which the mapping keeps open. The kernel releases it when the last
array over the mapping is deleted or the process dies. Only then does the store free the bytes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np
import xxhash

from proto import blockfile, dtypes
from proto.blockfile import Selection, Table
from proto.tensors import Array
from shared.dataplane.reused_pages import ReadMappingPool
from shared.dataplane.write import HALVE_BYTES, SMALL_BYTES
from shared.os_limits import raise_descriptor_limit

CACHED_ROWS = 1 << 18
TABLE_ROWS = 24
"""Fixed cost of a table, in rows of 60 bytes. Without it, the size of a table of one row would be underestimated by a
factor of 20."""
SWEPT_TABLES = 64
"""Number of cached tables from which on those of files that have been collected are dropped."""
CACHED_FILES = 4096
"""Maximum number of cached mappings. A batch of 130,000 tasks, 64 to a file, takes up 2048 files. The kernel's page
tables take 1/512 of the mapped bytes."""
DESCRIPTOR_SHARE = 4
"""The maximum number of a store's mappings is the descriptor limit divided by this value."""
AGAIN_S = 0.05
"""Seconds to wait before a file is located again because it no longer has the name under which it was found."""
TOUCH_BYTES = 64 << 10
"""Number of bytes that the kernel maps around a page that is read for the first time."""


def lock_named(path: str, flags: int) -> int | None:
    """Return a descriptor for `path` with a shared lock, or None if the name no longer leads to that file."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        mine, named = os.fstat(descriptor), os.stat(path)
    except FileNotFoundError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    if (mine.st_dev, mine.st_ino) != (named.st_dev, named.st_ino):
        os.close(descriptor)
        return None
    return descriptor


class DamagedShards(Exception):
    """Shards (`names`, each `task_id#key`) whose bytes are not the ones that were put."""

    def __init__(self, path: str, names: list[str]) -> None:
        super().__init__(f"{path}: {len(names)} shards do not match their checksums; the first is {names[0]}")
        self.names = names


class KnownTable(NamedTuple):
    """The table of a file, and a mask of the rows that this process has verified against their checksums, bool
    [rows]."""

    table: Table
    verified: Array


class TableCache:
    """Parsed headers of recent files by path, at most `most_rows` rows of 60 bytes (None: `CACHED_ROWS`, 16 MB).

    Files do not change, and their names, which contain a random put id, are not reused: when the pages of a collected
    file are lent to a new put, the file gets a new name. Rows verified under a name therefore stay verified, and the
    table of a name that no longer exists is not needed again. Whenever the number of tables has doubled, those of such
    files are dropped, so that the cache does not grow with the number of steps.
    """

    def __init__(self, most_rows: int | None = None) -> None:
        self._most_rows = most_rows
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, KnownTable] = OrderedDict()
        self._rows = 0
        self._sweep_at = SWEPT_TABLES

    def get(self, path: str, data: mmap.mmap | Array) -> KnownTable:
        """Return the table of the file at `path`, mapped as `data`. Raises WireError."""
        with self._lock:
            entry = self._tables.get(path)
            if entry is not None:
                self._tables.move_to_end(path)
                return entry
        with memoryview(data if isinstance(data, mmap.mmap) else data.data) as view:
            table = blockfile.parse(view, len(data))
        entry = KnownTable(table, np.zeros(table.row_count, bool))
        with self._lock:
            if path not in self._tables:
                self._tables[path] = entry
                self._rows += TABLE_ROWS + table.row_count
            most = CACHED_ROWS if self._most_rows is None else self._most_rows
            while self._rows > most and len(self._tables) > 1:
                self._drop(next(iter(self._tables)))
            paths = list(self._tables) if len(self._tables) > self._sweep_at else []
        if paths:
            self._sweep(paths)
        return entry

    def _sweep(self, paths: list[str]) -> None:
        """Drop the tables of those files among `paths` that have been collected."""
        gone = [path for path in paths if not os.path.exists(path)]  # outside the lock, because there may be many
        with self._lock:
            for path in gone:
                self._drop(path)
            self._sweep_at = max(SWEPT_TABLES, 2 * len(self._tables))

    def _drop(self, path: str) -> None:
        entry = self._tables.pop(path, None)
        if entry is not None:
            self._rows -= TABLE_ROWS + entry.table.row_count

    def __len__(self) -> int:
        return len(self._tables)


class MappingCache:
    """Read-only mappings of the most recently read files. Mapping a file accounts for half of the cost of sending it.

    The cache keeps at most `CACHED_FILES` mappings. Together with the mappings that streams still use, there are at
    most `most_files`, so that descriptors remain for other uses. A mapping pins its file: the file is not deleted while
    the mapping or a view of it exists. Code that retires a file must `drop` it here. Any thread may use the cache.
    """

    def __init__(self) -> None:
        self.most_files = raise_descriptor_limit() // DESCRIPTOR_SHARE
        self._lock = threading.Lock()
        self._mapped: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._alive: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def get(self, path: str) -> mmap.mmap:
        """Return a read-only mapping of the file.

        Raises FileNotFoundError if it has been collected, and OSError (EMFILE) if streams have too many files mapped.
        """
        with self._lock:
            mapping = self._mapped.get(path)
            if mapping is not None:
                self._mapped.move_to_end(path)
                return mapping
            full = len(self._alive) >= self.most_files
        if full:
            self.clear()
            if len(self._alive) >= self.most_files:
                raise OSError(errno.EMFILE, f"{self.most_files} files are mapped for streams", path)
        mapping = _map_named(path)
        with self._lock:
            self._mapped[path] = mapping
            self._alive.add(mapping)
            oldest = self._mapped.popitem(last=False)[1] if len(self._mapped) > CACHED_FILES else None
        del oldest  # outside the lock, as in `drop`
        if not os.path.exists(path):  # retired in the meantime, perhaps before it was cached
            self.drop(path)
            raise FileNotFoundError(path)
        return mapping

    def clear(self) -> None:
        """Drop all mappings. Streams that are still sending from them continue."""
        with self._lock:
            mapped, self._mapped = self._mapped, OrderedDict()
        mapped.clear()

    def drop(self, path: str) -> None:
        """Drop the mapping of a file that has lost its name. Streams that are still sending from it continue."""
        with self._lock:
            mapping = self._mapped.pop(path, None)
        del mapping  # outside the lock, because unmapping takes time


class BlockMapping:
    """One mapping of one file. It lives as long as this object or any array made from it."""

    def __init__(self, path: str, cache: TableCache, kept: ReadMappingPool | None = None) -> None:
        """`kept` is searched first for an earlier mapping of the same inode.

        Raises FileNotFoundError if the file has been collected, and WireError if it is not a block file.
        """
        self._data: mmap.mmap | Array
        self._touched = False
        descriptor = _open_named(path)
        earlier = None
        try:
            earlier = kept.of(descriptor) if kept is not None else None
            if earlier is not None:
                self._data, self._touched = earlier
            else:
                self._data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            if earlier is None:
                os.close(descriptor)  # the mapping keeps a duplicate, which holds the lock
        self._path = path
        self.table, self._verified = cache.get(path, self._data)

    def arrays(
        self, tasks: Sequence[int], keys: Sequence[str] | None, helper: Executor | None = None
    ) -> list[dict[str, Array]]:
        """Return this file's shards of `tasks` (indices into `table`) as private writable views: those of `keys`, or
        all if `keys` is None.

        Each shard is compared with its checksum the first time that this process reads it. For a large file,
        `helper`'s thread compares half of the shards. Raises DamagedShards.
        """
        picked = self.table.select(tasks, keys)
        self._verify(picked.numbers, helper)
        return views(self.table, self._data, picked)

    def _verify(self, rows: Array, helper: Executor | None) -> None:
        """Compare `rows` with their checksums, except those that this process has already verified."""
        rows = np.sort(rows[~self._verified[rows]])
        if not len(rows):
            return
        begins, ends, checksums = self.table.placed(rows)
        with memoryview(self._data if isinstance(self._data, mmap.mmap) else self._data.data) as view:

            def hashed(first: int, last: int) -> list[int]:
                bounds = zip(begins[first:last], ends[first:last], strict=True)
                return [xxhash.xxh3_64_intdigest(view[begin:end]) for begin, end in bounds]

            nbytes = ends[-1] - begins[0]
            if helper is None or nbytes < max(HALVE_BYTES, SMALL_BYTES * len(rows)):
                # For small rows a second thread would only wait for the interpreter lock.
                computed = hashed(0, len(rows))
            else:
                middle = bisect_right(ends, begins[0] + nbytes // 2)
                other = helper.submit(hashed, middle, len(rows))
                computed = hashed(0, middle) + other.result()
        wrong = np.array(computed, np.uint64) != np.array(checksums, np.uint64)
        if wrong.any():
            raise DamagedShards(self._path, self.table.named(rows[wrong]))
        self._verified[rows] = True

    def touch(self, helper: Executor) -> None:
        """Take the page faults now, on this thread and `helper`'s, instead of when the arrays are first read."""
        if self._touched:
            return
        pages = np.frombuffer(self._data, np.uint8)[::TOUCH_BYTES]
        middle = len(pages) // 2
        other = helper.submit(pages[middle:].max)
        pages[:middle].max(initial=0)
        other.result()


def views(table: Table, data: mmap.mmap | Array, picked: Selection) -> list[dict[str, Array]]:
    """Return views of the picked shards in a mapped file, one dict per task."""
    flat = {code: _flat(data, code) for code in np.unique(picked.codes).tolist()}
    width = picked.columns()
    if width:
        return _by_column(table, picked, flat, width)
    bounds = zip(picked.codes.tolist(), picked.first.tolist(), picked.end.tolist(), strict=True)
    arrays: list[Array] = [flat[code][first:end] for code, first, end in bounds]
    for row, shape in picked.shapes.items():
        arrays[row] = arrays[row].reshape(shape)
    names = [table.keys[number] for number in picked.keys.tolist()]
    per_task: list[dict[str, Array]] = []
    begin = 0
    for count in picked.counts.tolist():
        end = begin + count
        per_task.append(dict(zip(names[begin:end], arrays[begin:end], strict=True)))
        begin = end
    return per_task


def _by_column(table: Table, picked: Selection, flat: dict[int, Array], width: int) -> list[dict[str, Array]]:
    """Do the work of `views` in a third of the time, for tasks with the same keys and types."""
    columns: list[list[Array]] = []
    for at, code in enumerate(picked.codes[:width].tolist()):
        whole = flat[code]
        bounds = zip(picked.first[at::width].tolist(), picked.end[at::width].tolist(), strict=True)
        columns.append([whole[first:end] for first, end in bounds])
    for row, shape in picked.shapes.items():
        task, at = divmod(row, width)
        columns[at][task] = columns[at][task].reshape(shape)
    names = [table.keys[number] for number in picked.keys[:width].tolist()]
    return [dict(zip(names, arrays, strict=True)) for arrays in zip(*columns, strict=True)]


def merged(first: dict[str, Array], second: dict[str, Array], order: Sequence[str]) -> dict[str, Array]:
    """Return the arrays of one task from two places, in `order` if it is not empty.

    If a key was put twice, both arrays have the same bytes, and the one in `first` is used.
    """
    both = second | first
    return {key: both[key] for key in order if key in both} if order else both


def _flat(data: mmap.mmap | Array, code: int) -> Array:
    """Return a whole mapping as elements of one type, without a copy. Slices keep the mapping alive."""
    dtype = dtypes.by_code(code).numpy
    whole: Array = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    return whole


def _map_named(path: str) -> mmap.mmap:
    descriptor = _open_named(path)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)  # the mapping keeps a duplicate, which holds the lock


def _open_named(path: str) -> int:
    descriptor = lock_named(path, os.O_RDONLY)
    if descriptor is None:
        raise FileNotFoundError(path)
    return descriptor
