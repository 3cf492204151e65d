"""Memory into which one stream is received. Bytes are checked as they arrive; arrays are made once all bytes have been
checked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import xxhash

from proto import blockfile
from proto.blockfile import Table
from proto.errors import WireError
from proto.limits import MAX_NDIM
from proto.messages import PutTask, StreamOpened
from proto.tensors import Array
from shared.dataplane.mapping import views
from shared.dataplane.reused_pages import Regions

_HASH_BYTES = 4 << 20
"""Size in bytes above which a shard is hashed while it arrives instead of when it is complete."""


class Arrival:
    """A stream that is being received. One thread writes its bytes; the same or another thread checks them."""

    def __init__(
        self, opened: StreamOpened, tasks: Sequence[PutTask], keys: Sequence[str], max_bytes: int, regions: Regions
    ) -> None:
        """Check the store's announcement against the request. Raises WireError if they disagree.

        `tasks` lists the tasks that the stream covers. Memory is used as bytes arrive, not as they are announced.
        """
        # The head and the padding, which are bounded here, are not part of the requested maximum.
        slack = opened.head_bytes + 64 * opened.head_bytes // 32 if opened.covered > 1 else blockfile.MAX_FILE_BYTES
        if not 0 < opened.head_bytes <= opened.total_bytes <= min(max_bytes + slack, blockfile.MAX_FILE_BYTES):
            raise WireError(f"stream of {opened.total_bytes} bytes, head {opened.head_bytes}: requested {max_bytes}")
        if keys and opened.head_bytes > _head_limit(tasks, keys):
            raise WireError(f"stream with a head of {opened.head_bytes} bytes for {len(tasks)} tasks, {len(keys)} keys")
        self.total_bytes = opened.total_bytes
        self.received = 0
        """Number of bytes, counted from the start, that have arrived."""
        self._tasks, self._keys = tasks, keys
        self._head = (opened.head_bytes, opened.head_checksum)
        self._table: Table | None = None
        self._rows: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._row = self._hashed = 0
        self._partial: xxhash.xxh3_64 | None = None
        self._arrays: list[dict[str, Array]] | None = None
        try:
            self._memory = regions.take(self.total_bytes)
        except OSError as error:
            raise WireError(f"stream of {self.total_bytes} bytes: no memory for it ({error.strerror})") from None
        self._view = self._memory.data[: self.total_bytes]

    def is_same(self, opened: StreamOpened) -> bool:
        """Return whether `opened` is this stream, opened again. If so, the bytes that arrived are kept."""
        return (opened.total_bytes, opened.head_bytes, opened.head_checksum) == (self.total_bytes, *self._head)

    def room(self, nbytes: int) -> memoryview:
        """Return the memory for the next `nbytes` bytes."""
        return self._view[self.received : self.received + nbytes]

    def arrays(self) -> list[dict[str, Array]]:
        """Return the shards of each task as views of the memory into which they were received.

        Raises WireError unless the stream is complete and every row was checked.
        """
        if self._arrays is None:
            raise WireError(f"stream: {self.received} of {self.total_bytes} bytes arrived, and not all were checked")
        return self._arrays

    def check(self, upto: int) -> None:
        """Check the first `upto` bytes, which have arrived, and make the arrays if they are the whole stream.

        Raises WireError, on this and every later call, if they are not the bytes that were put.
        """
        if self._table is None:
            head_bytes, checksum = self._head
            if upto < head_bytes:
                return
            head = self._view[:head_bytes]
            if xxhash.xxh3_64_intdigest(head) != checksum:
                raise WireError("stream: its head is not the one that was announced")
            table = blockfile.parse(head, self.total_bytes)
            self._check_content(table)
            self._rows = table.placed()
            self._table = table
        begins, ends, checksums = self._rows
        while self._row < len(begins):
            if self._partial is None:
                self._check_rows(bisect_right(ends, upto, self._row))
            begin = begins[self._row] if self._row < len(begins) else upto
            if begin >= upto or not self._check_large(begin, ends[self._row], checksums[self._row], upto):
                break
        if self._row == len(begins) and upto == self.total_bytes:
            picked = self._table.select(range(len(self._tasks)), self._keys or None)
            self._arrays = views(self._table, self._memory, picked)

    def _check_rows(self, upto: int) -> None:
        """Check the rows before row `upto`, which have arrived completely. Most of the cost of checking is here."""
        begins, ends, checksums = self._rows
        mine, view, digest = slice(self._row, upto), self._view, xxhash.xxh3_64_intdigest
        computed = [digest(view[begin:end]) for begin, end in zip(begins[mine], ends[mine], strict=True)]
        if computed != checksums[mine]:
            bad = next(row for row in range(self._row, upto) if computed[row - self._row] != checksums[row])
            raise WireError(f"stream: row {bad} of {ends[bad] - begins[bad]} bytes does not match its checksum")
        self._row = upto

    def _check_large(self, begin: int, end: int, checksum: int, upto: int) -> bool:
        """If the next row is large, check the part of it that has arrived. Return whether this completes the
        row."""
        if end - begin <= _HASH_BYTES:
            return False
        if self._partial is None:
            self._partial, self._hashed = xxhash.xxh3_64(), begin
        self._partial.update(self._view[self._hashed : min(end, upto)])
        self._hashed = min(end, upto)
        if end > upto:
            return False
        if self._partial.intdigest() != checksum:
            raise WireError(f"stream: row {self._row} of {end - begin} bytes does not match its checksum")
        self._partial = None
        self._row += 1
        return True

    def _check_content(self, table: Table) -> None:
        """Raise WireError if a well-formed head does not describe the requested tasks and keys."""
        count = len(table.task_ids)
        if [task.task_id for task in self._tasks] != table.task_ids or [
            task.fence for task in self._tasks
        ] != table.fences:
            raise WireError(f"stream: holds {count} tasks that are not the {len(self._tasks)} asked for")
        if self._keys and (set(table.keys) != set(self._keys) or table.row_count != count * len(set(self._keys))):
            raise WireError("stream: does not hold the keys that were asked for")


def _head_limit(tasks: Sequence[PutTask], keys: Sequence[str]) -> int:
    """Return the maximum total length of the header and table in a block file with these shards (`proto.blockfile`)."""
    names = sum(len(task.task_id) + 1 for task in tasks) + sum(len(key) + 1 for key in keys)
    return blockfile.HEADER_BYTES + 12 * len(tasks) + names + (32 + 8 * MAX_NDIM) * len(tasks) * len(keys)
