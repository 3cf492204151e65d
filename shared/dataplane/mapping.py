"""Maps sealed block files copy-on-write and makes arrays of their shards. It must never give out a collected file.

Each fetch maps for itself: a reader that writes to its arrays changes nobody else's, in its own process either. The
lock taken here belongs to the open file description, which the mapping keeps: the kernel releases it when the last
array over the mapping goes or the process dies, and only then the store gives the bytes free.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from proto import blockfile, dtypes, selection
from proto.blockfile import Table
from proto.tensors import Array
from shared.dataplane.reread import ReadMappingPool
from shared.descriptors import raise_descriptor_limit

CACHED_ROWS = 1 << 18
TABLE_ROWS = 24
"""What a table takes beside its rows (60 bytes each), in rows: files of one row each would cost 20 times as much."""
CACHED_FILES = 4096
"""A batch of 130,000 tasks in groups of 64 is 2048 files; the kernel's tables take 1/512 of the bytes mapped."""
DESCRIPTOR_SHARE = 4
"""A store's mappings: at most the limit on descriptors by this."""
AGAIN_S = 0.05
"""Between two looks for a file that has left the name under which it was found."""
TOUCH_BYTES = 64 << 10
"""The kernel maps so many bytes around a page that is read for the first time."""


def lock_named(path: str, flags: int) -> int | None:
    """A descriptor of `path` under a shared lock, or None when the name no longer leads to that file."""
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


class TableCache:
    """Parsed headers by path, newest kept, about 16 MB at most. Files never change, names are never reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._rows = 0

    def get(self, path: str, data: mmap.mmap | Array) -> Table:
        """The table of the file at `path`, mapped as `data`. Raises WireError."""
        with self._lock:
            table = self._tables.get(path)
            if table is not None:
                self._tables.move_to_end(path)
                return table
        with memoryview(data if isinstance(data, mmap.mmap) else data.data) as view:
            table = blockfile.parse(view, len(data))
        with self._lock:
            if path not in self._tables:
                self._tables[path] = table
                self._rows += TABLE_ROWS + table.row_count
            while self._rows > CACHED_ROWS and len(self._tables) > 1:
                self._rows -= TABLE_ROWS + self._tables.popitem(last=False)[1].row_count
        return table

    def __len__(self) -> int:
        return len(self._tables)


class MappingCache:
    """Read-only mappings of the files that were read last, because half of what it costs to send a file is mapping it.

    At most `CACHED_FILES`, and with those that streams still send `most_files`, which leaves descriptors for all else.
    A mapping pins its file: that is not deleted while this or a view of it lives. Whoever retires a file must `drop` it
    here. Any thread.
    """

    def __init__(self) -> None:
        self.most_files = raise_descriptor_limit() // DESCRIPTOR_SHARE
        self._lock = threading.Lock()
        self._mapped: OrderedDict[str, mmap.mmap] = OrderedDict()
        self._alive: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def get(self, path: str) -> mmap.mmap:
        """The file, read-only. Raises FileNotFoundError when it was collected, OSError (EMFILE) when streams have too
        many mapped.
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
        del oldest  # outside of the lock, too
        if not os.path.exists(path):  # retired meanwhile, perhaps before it stood here
            self.drop(path)
            raise FileNotFoundError(path)
        return mapping

    def clear(self) -> None:
        """Keep none; streams that send them go on."""
        with self._lock:
            mapped, self._mapped = self._mapped, OrderedDict()
        mapped.clear()

    def drop(self, path: str) -> None:
        """The file has lost that name; streams that send it go on."""
        with self._lock:
            mapping = self._mapped.pop(path, None)
        del mapping  # outside of the lock: unmapping takes its time


class BlockMapping:
    """One mapping of one file; lives as long as this object or any array made by it."""

    def __init__(self, path: str, cache: TableCache, kept: ReadMappingPool | None = None) -> None:
        """`kept`: look there first for a mapping of a file that came back under this name.

        Raises FileNotFoundError when the file was collected, WireError when it is no block file.
        """
        self._data: mmap.mmap | Array
        self._touched = False
        descriptor = _open_named(path)
        found = None
        try:
            found = kept.of(descriptor) if kept is not None else None
            if found is not None:
                self._data, self._touched = found
            else:
                self._data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            if found is None:
                os.close(descriptor)  # the mapping keeps a duplicate, hence the lock
        self._table = cache.get(path, self._data)

    @property
    def table(self) -> Table:
        return self._table

    def arrays(self, tasks: Sequence[int], keys: Sequence[str] | None) -> list[dict[str, Array]]:
        """The shards that are here of tasks (by index in `table`), all or those in `keys`; writable, private views."""
        return views(self._table, self._data, tasks, keys)

    def touch(self, helper: Executor) -> None:
        """Take the page faults here and on `helper`'s thread, instead of where the arrays are read first."""
        if self._touched:
            return
        pages = np.frombuffer(self._data, np.uint8)[::TOUCH_BYTES]
        middle = len(pages) // 2
        other = helper.submit(pages[middle:].max)
        pages[:middle].max(initial=0)
        other.result()


def views(
    table: Table,
    data: mmap.mmap | Array,
    tasks: Sequence[int],
    keys: Sequence[str] | None,
    moves: Array | None = None,
) -> list[dict[str, Array]]:
    """Shards in a mapped file, one dict a task (by its index), all of them or those in `keys`, without a copy.

    `moves`: by how many bytes each task stands further to the front than in the file.
    """
    picked = selection.select(table, tasks, keys, moves)
    flat = {code: _flat(data, code) for code in np.unique(picked.codes).tolist()}
    each = picked.columns()
    if each:
        return _by_column(table, picked, flat, each)
    bounds = zip(picked.codes.tolist(), picked.first.tolist(), picked.end.tolist(), strict=True)
    arrays: list[Array] = [flat[code][first:end] for code, first, end in bounds]
    for row, shape in picked.shapes.items():
        arrays[row] = arrays[row].reshape(shape)
    names = [table.keys[number] for number in picked.keys.tolist()]
    found: list[dict[str, Array]] = []
    begin = 0
    for count in picked.counts.tolist():
        end = begin + count
        found.append(dict(zip(names[begin:end], arrays[begin:end], strict=True)))
        begin = end
    return found


def _by_column(table: Table, picked: selection.Selection, flat: dict[int, Array], each: int) -> list[dict[str, Array]]:
    """`views` where all tasks have the same keys and types: a third of the time."""
    columns: list[list[Array]] = []
    for at, code in enumerate(picked.codes[:each].tolist()):
        whole = flat[code]
        bounds = zip(picked.first[at::each].tolist(), picked.end[at::each].tolist(), strict=True)
        columns.append([whole[first:end] for first, end in bounds])
    for row, shape in picked.shapes.items():
        task, at = divmod(row, each)
        columns[at][task] = columns[at][task].reshape(shape)
    names = [table.keys[number] for number in picked.keys[:each].tolist()]
    return [dict(zip(names, arrays, strict=True)) for arrays in zip(*columns, strict=True)]


def merged(first: dict[str, Array], second: dict[str, Array], order: Sequence[str]) -> dict[str, Array]:
    """Arrays of one task from two places; of a key that was put twice (the same bytes) the first will do.

    In `order`, if there is one.
    """
    both = second | first
    return {key: both[key] for key in order if key in both} if order else both


def _flat(data: mmap.mmap | Array, code: int) -> Array:
    """All of a mapping as elements of one type; slices of it keep it alive, and nothing copies."""
    dtype = dtypes.by_code(code).numpy
    whole: Array = np.frombuffer(data, dtype, len(data) // dtype.itemsize)
    return whole


def _map_named(path: str) -> mmap.mmap:
    descriptor = _open_named(path)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)  # the mapping keeps a duplicate, hence the lock


def _open_named(path: str) -> int:
    descriptor = lock_named(path, os.O_RDONLY)
    if descriptor is None:
        raise FileNotFoundError(path)
    return descriptor
