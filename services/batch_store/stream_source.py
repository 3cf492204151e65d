"""What one stream sends: pinned files and where each chunk's bytes lie in them. It must never outlive its pins.

The files are mapped under a shared lock, as any reader maps them: while a stream is open (or a frame of it waits to be
sent) what it reads stays, even when its tasks are collected; the bytes stay counted.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence

import xxhash

from proto import excerpt
from proto.blockfile import Table
from proto.excerpt import Excerpt, Picks
from proto.messages import Located, PutTask
from shared.dataplane.mapping import MappingCache
from shared.dataplane.stream import missing_shards

STREAM_SHARE = 4
"""One stream: at most the files that may be mapped by this."""


class StreamSource:
    """The block file that a stream is, as pieces of others. Immutable: any thread."""

    def __init__(self, made: Excerpt, files: Sequence[mmap.mmap], chunk_bytes: int) -> None:
        self.total_bytes = made.total_bytes
        self.head_bytes = len(made.head)
        self.head_checksum = xxhash.xxh3_64_intdigest(made.head)
        self.covered = made.covered
        self.chunk_bytes = chunk_bytes
        self.chunks = -(-made.total_bytes // chunk_bytes)
        views = [memoryview(made.head), *(memoryview(file) for file in files)]
        # run 0 is the head
        self._views = [views[0], *(views[number + 1] for number in made.files)]
        self._sources = [0, *made.sources]
        self._targets = [0, *made.targets]
        self._lengths = [len(made.head), *made.lengths]
        self._gap = memoryview(bytes(64))

    def size(self, index: int) -> int:
        """Bytes of chunk `index`."""
        return min(self.chunk_bytes, self.total_bytes - index * self.chunk_bytes)

    def pieces(self, index: int) -> list[memoryview]:
        """Views which, one after the other, are chunk `index`; one view wherever its bytes lie together."""
        at = index * self.chunk_bytes
        end = at + self.size(index)
        found: list[memoryview] = []
        run = bisect_right(self._targets, at) - 1
        while at < end:
            begin, length = self._targets[run], self._lengths[run]
            if at < begin + length:
                upto = min(end, begin + length)
                source = self._sources[run] + at - begin
                found.append(self._views[run][source : source + upto - at])
            else:  # the zeros that bring the next run to its alignment
                upto = min(end, self._targets[run + 1])
                found.append(self._gap[: upto - at])
            at = upto
            if at >= begin + length and run + 1 < len(self._targets) and at >= self._targets[run + 1]:
                run += 1
        return found


def pin(
    name: str,
    located: Located,
    tasks: Sequence[PutTask],
    keys: Sequence[str],
    max_bytes: int,
    chunk_bytes: int,
    cache: MappingCache,
) -> StreamSource:
    """Map the files and plan the stream; blocking, for a thread of its own. `name`: the store, for errors.

    As many of the first tasks as are in few enough files. Raises FileNotFoundError when a file was collected meanwhile
    (locate again), RpcError(missing) naming the shards, OSError (EMFILE) when other streams have too many files.
    """
    count, files = _few(located, cache.most_files // STREAM_SHARE)
    tasks, located = tasks[:count], Located(files=located.files[:files], places=located.places[:count])
    mappings = [cache.get(path) for path in located.files]
    tables = [mapping.table for mapping in mappings]
    picks = _picks(tables, tasks, located.places)
    made = excerpt.make(tables, picks, keys, max_bytes)
    if made is None:
        names = excerpt.missing_keys(tables, picks, keys)
        raise missing_shards(name, names)
    return StreamSource(made, [mapping.data for mapping in mappings], chunk_bytes)


def _few(located: Located, most_files: int) -> tuple[int, int]:
    """How many of the first tasks are in so many files (one task at least), and in how many they are."""
    files = 0
    for count, places in enumerate(located.places):
        needed = max(files, max(places) + 1)
        if count and needed > most_files:
            return count, files
        files = needed
    return len(located.places), files


def _picks(tables: Sequence[Table], tasks: Sequence[PutTask], places: Sequence[Sequence[int]]) -> Picks:
    wanted = [(task.task_id, task.fence) for task in tasks]
    files = [file for each in places for file in each]
    owners: Sequence[int] = range(len(tasks))
    if len(files) != len(tasks):
        owners = [at for at, each in enumerate(places) for _ in each]
    indices = [table.index for table in tables]
    return Picks(
        [task.task_id for task in tasks],
        [task.fence for task in tasks],
        files,
        [indices[file][wanted[at]] for file, at in zip(files, owners, strict=True)],
        owners,
    )
