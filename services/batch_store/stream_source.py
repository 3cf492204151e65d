"""Provides the content of one stream: pinned files, and the position of each range in them.

The files are mapped under a shared lock, as any reader maps them. While a stream is open, or one of its frames is
waiting to be sent, the bytes that it reads remain in place and continue to count as used, even if its tasks are
collected.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from proto import excerpt
from proto.blockfile import Table
from proto.errors import WireError
from proto.excerpt import Excerpt, Picks
from proto.messages import PutTask
from shared.dataplane.mapping import MappingCache
from shared.dataplane.stream import missing_shards

STREAM_SHARE = 4
"""A stream reads from at most 1/STREAM_SHARE of the number of files that the store may map for streams."""


class SealedFile(NamedTuple):
    """A sealed file: its path, and its table at the time of the seal."""

    path: str
    table: Table


class StreamSource:
    """The block file that a stream sends, composed of pieces of other files. Immutable and thread-safe."""

    def __init__(self, made: Excerpt, files: Sequence[mmap.mmap]) -> None:
        self.total_bytes = self.available_bytes = made.total_bytes
        self.head_bytes = len(made.head)
        self.head_checksum = xxhash.xxh3_64_intdigest(made.head)
        self.covered = made.covered
        views = [memoryview(made.head), *(memoryview(file) for file in files)]
        # Run 0 is the head.
        self._views = [views[0], *(views[number + 1] for number in made.files)]
        self._sources = [0, *made.sources]
        self._targets = [0, *made.targets]
        self._lengths = [len(made.head), *made.lengths]
        self._gap = memoryview(bytes(64))

    def pieces(self, at: int, nbytes: int) -> list[memoryview]:
        """Return views whose concatenation is the `nbytes` bytes starting at offset `at`. These bytes must lie within
        the stream.

        Bytes that are contiguous in a file are one view.
        """
        end = at + nbytes
        views: list[memoryview] = []
        run = bisect_right(self._targets, at) - 1
        while at < end:
            begin, length = self._targets[run], self._lengths[run]
            if at < begin + length:
                upto = min(end, begin + length)
                source = self._sources[run] + at - begin
                views.append(self._views[run][source : source + upto - at])
            else:  # the zeros that align the next run
                # After the last run, the zeros extend to the end of the file if the file ends with an empty shard.
                upto = min(end, self._targets[run + 1]) if run + 1 < len(self._targets) else end
                views.append(self._gap[: upto - at])
            at = upto
            if at >= begin + length and run + 1 < len(self._targets) and at >= self._targets[run + 1]:
                run += 1
        return views


def pin(
    name: str,
    files: Sequence[SealedFile],
    places: Sequence[Sequence[int]],
    tasks: Sequence[PutTask],
    keys: Sequence[str],
    max_bytes: int,
    cache: MappingCache,
) -> StreamSource:
    """Map the files and return a stream of the first tasks, as many as fit. Blocks, so call it on a worker thread.

    `name` is the store's name, for error messages. `places[i]` are the indices of the files that hold task i. The
    number of files and `max_bytes` limit the number of tasks. Raises FileNotFoundError if a file was collected in the
    meantime (locate it again), RpcError(missing) with the names of the shards, OSError (EMFILE) if other streams have
    mapped too many files, and WireError if a file does not have its sealed size.
    """
    count, needed = _few(places, cache.most_files // STREAM_SHARE)
    tasks, files, places = tasks[:count], files[:needed], places[:count]
    mappings = [cache.get(file.path) for file in files]
    tables = [file.table for file in files]
    for file, mapping in zip(files, mappings, strict=True):
        if len(mapping) != file.table.file_bytes:
            raise WireError(f"{name}: {file.path} has {len(mapping)} bytes; it was sealed with {file.table.file_bytes}")
    picks = _picks(tables, tasks, places)
    made = excerpt.make(tables, picks, keys, max_bytes)
    if made is None:
        names = excerpt.missing_keys(tables, picks, keys)
        raise missing_shards(name, names)
    return StreamSource(made, mappings)


def _few(places: Sequence[Sequence[int]], most_files: int) -> tuple[int, int]:
    """Return how many of the first tasks, at least one, fit into `most_files` files, and the number of those files."""
    files = 0
    for count, mine in enumerate(places):
        needed = max(files, max(mine) + 1)
        if count and needed > most_files:
            return count, files
        files = needed
    return len(places), files


def _picks(tables: Sequence[Table], tasks: Sequence[PutTask], places: Sequence[Sequence[int]]) -> Picks:
    wanted = [(task.task_id, task.fence) for task in tasks]
    files = [file for numbers in places for file in numbers]
    owners: Sequence[int] = range(len(tasks))
    if len(files) != len(tasks):
        owners = [at for at, numbers in enumerate(places) for _ in numbers]
    indices = [table.index for table in tables]
    return Picks(
        [task.task_id for task in tasks],
        [task.fence for task in tasks],
        files,
        [indices[file][wanted[at]] for file, at in zip(files, owners, strict=True)],
        owners,
    )
