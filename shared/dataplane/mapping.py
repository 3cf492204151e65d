"""Maps sealed block files copy-on-write and makes arrays of their shards. It must never give out a collected file.

Each fetch maps for itself: a reader that writes to its arrays changes nobody else's, in its own process either. The
lock taken here belongs to the open file description, which the mapping keeps: the kernel releases it when the last
array over the mapping goes or the process dies, and only then the store gives the bytes free.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from proto import blockfile
from proto.blockfile import Table
from proto.tensors import Array

CACHED_ROWS = 1 << 18


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
    """Parsed headers by path, newest kept, at most CACHED_ROWS rows. Files never change, names are never reused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._rows = 0

    def get(self, path: str, data: mmap.mmap) -> Table:
        """The table of the file at `path`, mapped as `data`. Raises WireError."""
        with self._lock:
            table = self._tables.get(path)
            if table is not None:
                self._tables.move_to_end(path)
                return table
        with memoryview(data) as view:
            table = blockfile.parse(view, len(data))
        with self._lock:
            if path not in self._tables:
                self._tables[path] = table
                self._rows += table.row_count
            while self._rows > CACHED_ROWS and len(self._tables) > 1:
                self._rows -= self._tables.popitem(last=False)[1].row_count
        return table


class SharedMapping:
    """A read-only mapping of one file, which pins it: it is not deleted while this or a view of `data` lives."""

    def __init__(self, path: str, cache: TableCache) -> None:
        """Raises FileNotFoundError when the file was collected, WireError when it is no block file."""
        self.data = _map_named(path, mmap.ACCESS_READ)
        self.table = cache.get(path, self.data)


class BlockMapping:
    """One mapping of one file; lives as long as this object or any array made by it."""

    def __init__(self, path: str, cache: TableCache) -> None:
        """Raises FileNotFoundError when the file was collected, WireError when it is no block file."""
        self._data = _map_named(path, mmap.ACCESS_COPY)
        self._table = cache.get(path, self._data)

    def arrays(self, task_id: str, fence: int, keys: Sequence[str] | None) -> dict[str, Array]:
        """The shards of one task that are here, all of them or those in `keys`; writable, private views."""
        return views(self._table, self._data, task_id, fence, keys)


def views(table: Table, data: mmap.mmap, task_id: str, fence: int, keys: Iterable[str] | None) -> dict[str, Array]:
    """The shards of one task in a mapped file, all of them or those in `keys`, without a copy."""
    index = table.index.get((task_id, fence))
    if index is None:
        return {}
    found: dict[str, Array] = {}
    wanted = None if keys is None else frozenset(keys)
    for shard in table.shards(index):
        if wanted is not None and shard.key not in wanted:
            continue
        if shard.nbytes:
            found[shard.key] = np.ndarray(shard.shape, shard.dtype.numpy, buffer=data, offset=shard.offset)
        else:
            found[shard.key] = np.empty(shard.shape, shard.dtype.numpy)
    return found


def _map_named(path: str, access: int) -> mmap.mmap:
    descriptor = lock_named(path, os.O_RDONLY)
    if descriptor is None:
        raise FileNotFoundError(path)
    try:
        return mmap.mmap(descriptor, 0, access=access)
    finally:
        os.close(descriptor)  # the mapping keeps a duplicate, hence the lock
