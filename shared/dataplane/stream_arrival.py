"""The memory that one stream fills: chunks in any order, checked to the last byte. It must never show a part."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import xxhash

from proto import blockfile, excerpt, selection
from proto.blockfile import Table
from proto.bulk import MAX_CHUNK_BYTES, MIN_CHUNK_BYTES
from proto.errors import WireError
from proto.limits import MAX_NDIM
from proto.messages import PutTask, StreamOpened
from proto.tensors import Array
from shared.dataplane.mapping import views
from shared.dataplane.stream_memory import Lease, Regions

MAX_CHUNKS = 1 << 22
"""Of one stream: 4 TiB in chunks of 1 MiB. Which of them are here is known before the first comes."""
_HASH_BYTES = 4 << 20
"""A shard larger than this is hashed while it arrives, not when it is complete."""


class Arrived:
    """A received block file that passed every check. Any thread.

    The fetch that brought it is given the memory it came into, everyone else (the cache too) a copy of that. What a
    fetch was given, its owner may write to: it must never be copied from again.
    """

    def __init__(self, lease: Lease, table: Table, regions: Regions) -> None:
        self.table = table
        self.nbytes = lease.region.capacity
        """What it takes of memory."""
        self._regions = regions
        self._lock = threading.Lock()
        self._data: Array | None = lease.array()
        self._first: Array | None = self._data

    def first(self, tasks: Sequence[int], keys: Sequence[str] | None) -> list[dict[str, Array]]:
        """As `copies`, without copying, for the fetch that brought it; to be shown to its caller after `hand_out`."""
        if self._first is None:
            raise RuntimeError("stream: its first memory was given out already")
        return views(self.table, self._first, tasks, keys)

    def leave_copy(self) -> None:
        """For others, before the memory it came into is handed out."""
        with self._lock:
            if self._data is not None and self._data is self._first:
                self._data = Lease(self._regions, self.table.file_bytes).array()
                np.copyto(self._data[: self.table.file_bytes], self._first[: self.table.file_bytes])

    def hand_out(self) -> None:
        """From here on `first` may be written to."""
        with self._lock:
            if self._data is self._first:
                self._data = None
            self._first = None

    def copies(self, tasks: Sequence[int], keys: Sequence[str] | None) -> list[dict[str, Array]]:
        """The shards of tasks (by index), one dict each, all of them or those in `keys`; the caller's alone."""
        spans, moves = selection.spans(self.table, tasks)
        data = Lease(self._regions, sum(end - begin for begin, end in spans)).array()
        with self._lock:
            if self._data is None:
                raise RuntimeError("stream: its memory was given out and no copy was left")
            at = 0
            for begin, end in spans:
                np.copyto(data[at : at + end - begin], self._data[begin:end])
                at += end - begin
        return views(self.table, data, tasks, keys, moves)


class Arrival:
    """A stream on its way in. One thread puts chunks into their rooms, one checks what is there; it may be another."""

    def __init__(
        self,
        opened: StreamOpened,
        tasks: Sequence[PutTask],
        keys: Sequence[str],
        max_bytes: int,
        regions: Regions,
    ) -> None:
        """Checks what the store announced against what was asked for. Raises WireError.

        `tasks`: what the stream covers. Memory is taken as bytes come, not as they are announced.
        """
        if not MIN_CHUNK_BYTES <= opened.chunk_bytes <= MAX_CHUNK_BYTES:
            raise WireError(f"stream in chunks of {opened.chunk_bytes} bytes: {MIN_CHUNK_BYTES}..{MAX_CHUNK_BYTES}")
        # head and padding are beyond what was asked for: less than this for each task and shard
        slack = opened.head_bytes + 64 * opened.head_bytes // 32 if opened.covered > 1 else blockfile.MAX_FILE_BYTES
        if not 0 < opened.head_bytes <= opened.total_bytes <= min(max_bytes + slack, blockfile.MAX_FILE_BYTES):
            raise WireError(f"stream of {opened.total_bytes} bytes, head {opened.head_bytes}: asked for {max_bytes}")
        if keys and opened.head_bytes > _head_limit(tasks, keys):
            raise WireError(f"stream with a head of {opened.head_bytes} bytes for {len(tasks)} tasks, {len(keys)} keys")
        self.total_bytes, self.chunk_bytes = opened.total_bytes, opened.chunk_bytes
        self.chunks = -(-opened.total_bytes // opened.chunk_bytes)
        if self.chunks > MAX_CHUNKS:
            raise WireError(
                f"stream of {self.chunks} chunks of {opened.chunk_bytes} bytes: limit is {MAX_CHUNKS}; larger chunks"
            )
        self._tasks, self._keys = tasks, keys
        self._head = (opened.head_bytes, opened.head_checksum)
        self._have = bytearray(self.chunks)
        self._left = self.chunks
        self._prefix = 0
        self._table: Table | None = None
        self._rows: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._row = self._hashed = 0
        self._partial: xxhash.xxh3_64 | None = None
        self._regions = regions
        try:
            self._lease = Lease(regions, self.total_bytes)
        except OSError as error:
            raise WireError(f"stream of {self.total_bytes} bytes: no memory for it here ({error.strerror})") from None
        self._view = self._lease.region.view[: self.total_bytes]

    def same(self, opened: StreamOpened) -> bool:
        """Is this the same stream, opened again? Then what arrived stays."""
        return (opened.total_bytes, opened.chunk_bytes, opened.head_bytes, opened.head_checksum) == (
            self.total_bytes,
            self.chunk_bytes,
            *self._head,
        )

    @property
    def complete(self) -> bool:
        return not self._left

    @property
    def left(self) -> int:
        """Chunks that are not here."""
        return self._left

    @property
    def prefix(self) -> int:
        """Chunks from the first on that are here without a gap."""
        return self._prefix

    def has(self, index: int) -> bool:
        return self._have[index] == 1

    def size(self, index: int) -> int:
        """Bytes of chunk `index`."""
        return min(self.chunk_bytes, self.total_bytes - index * self.chunk_bytes)

    def room(self, index: int) -> memoryview:
        """Where chunk `index` belongs."""
        begin = index * self.chunk_bytes
        return self._view[begin : begin + self.chunk_bytes]

    def missing(self) -> list[tuple[int, int]]:
        """Ranges [from, end) of chunks that are not here."""
        ranges: list[tuple[int, int]] = []
        at = self._have.find(0)
        while at >= 0:
            end = self._have.find(1, at)
            end = self.chunks if end < 0 else end
            ranges.append((at, end))
            at = self._have.find(0, end)
        return ranges

    def arrived(self, index: int) -> int:
        """Chunk `index` is in its room; returns how many bytes from the start on are here, to be checked."""
        self._have[index] = 1
        self._left -= 1
        if index == self._prefix:
            end = self._have.find(0, index)
            self._prefix = self.chunks if end < 0 else end
        return self.here

    @property
    def here(self) -> int:
        """Bytes from the start on without a gap."""
        return min(self.total_bytes, self._prefix * self.chunk_bytes)

    def take(self) -> Arrived:
        """What arrived. Raises WireError unless it is complete and was checked to the last row."""
        if self._table is None or self._left or self._row != len(self._rows[0]):
            raise WireError(f"stream: {self._left} of {self.chunks} chunks are missing")
        return Arrived(self._lease, self._table, self._regions)

    def check(self, upto: int) -> None:
        """The first `upto` bytes, which are here. Raises WireError, each time, unless they are those that were put."""
        if self._table is None:
            head_bytes, checksum = self._head
            if upto < head_bytes:
                return
            head = self._view[:head_bytes]
            if xxhash.xxh3_64_intdigest(head) != checksum:
                raise WireError("stream: its head is not the one that was announced")
            table = blockfile.parse(head, self.total_bytes)
            self._check_content(table)
            self._rows = excerpt.rows_of(table)
            self._table = table
        begins, ends, checksums = self._rows
        whole = bisect_right(ends, upto, self._row)
        if self._partial is None and whole > self._row:
            self._check_rows(whole)
        if self._row < len(begins):
            self._check_large(begins[self._row], ends[self._row], checksums[self._row], upto)

    def _check_rows(self, upto: int) -> None:
        """Rows that are here from their first to their last byte: most of them, so this loop is what it costs."""
        begins, ends, checksums = self._rows
        view, digest, first = self._view, xxhash.xxh3_64_intdigest, self._row
        found = [digest(view[begin:end]) for begin, end in zip(begins[first:upto], ends[first:upto], strict=True)]
        if found != checksums[first:upto]:
            bad = next(row for row in range(first, upto) if found[row - first] != checksums[row])
            raise WireError(f"stream: row {bad} of {ends[bad] - begins[bad]} bytes does not have its checksum")
        self._row = upto

    def _check_large(self, begin: int, end: int, checksum: int, upto: int) -> None:
        """The next row, as far as it is here, unless it is so small that it can wait."""
        if end - begin <= _HASH_BYTES or begin >= upto:
            return
        if self._partial is None:
            self._partial, self._hashed = xxhash.xxh3_64(), begin
        self._partial.update(self._view[self._hashed : min(end, upto)])
        self._hashed = min(end, upto)
        if end > upto:
            return
        if self._partial.intdigest() != checksum:
            raise WireError(f"stream: row {self._row} of {end - begin} bytes does not have its checksum")
        self._partial = None
        self._row += 1
        self.check(upto)

    def _check_content(self, table: Table) -> None:
        """The head may be well-formed and yet not what was asked for."""
        held = len(table.task_ids)
        if [task.task_id for task in self._tasks] != table.task_ids or [
            task.fence for task in self._tasks
        ] != table.fences:
            raise WireError(f"stream: holds {held} tasks that are not the {len(self._tasks)} asked for")
        if self._keys and (set(table.keys) != set(self._keys) or table.row_count != held * len(set(self._keys))):
            raise WireError("stream: holds other keys than were asked for")


def _head_limit(tasks: Sequence[PutTask], keys: Sequence[str]) -> int:
    """No block file of these shards has a longer header and table (`proto.blockfile`)."""
    names = sum(len(task.task_id) + 1 for task in tasks) + sum(len(key) + 1 for key in keys)
    return blockfile.HEADER_BYTES + 12 * len(tasks) + names + (32 + 8 * MAX_NDIM) * len(tasks) * len(keys)
