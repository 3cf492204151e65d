"""Provides the content of streams: pinned files with the position of each range in them, or the bytes of a whole file.

Sealed files are mapped under a shared lock, as any reader maps them. While a stream is open, or one of its frames is
waiting to be sent, the bytes that it reads remain in place and continue to count as used, even if its tasks are
collected.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from proto import excerpt
from proto.blockfile import Table
from proto.errors import WireError
from proto.excerpt import Excerpt, Picks
from proto.ids import split_task_id
from proto.messages import ErrorCode, PutTask
from shared.dataplane.mapping import MappingCache
from shared.dataplane.stream import missing_shards
from shared.rpc.errors import RpcError
from shared.topology import Topology, distribution, document

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


class WholeSource:
    """The content of a stream without a head: a single block of bytes."""

    covered = 1
    head_bytes = head_checksum = 0

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.total_bytes = self.available_bytes = len(data)

    def pieces(self, at: int, nbytes: int) -> list[memoryview]:
        """Return the bytes `at` to `at + nbytes`."""
        return [self._data[at : at + nbytes]]


class DistributedFiles:
    """The topology's files that hosts fetch from the home host, as `files/0/<index>`. Index 0 is the list of these
    files."""

    def __init__(self, name: str, file: Path, topology: Topology) -> None:
        """`name` is the name of the store, for error messages; `file` holds the resolved topology."""
        self._name = name
        self._file = file
        self._is_distributed = topology.policy.distribute
        self._lock = threading.Lock()
        self._paths: list[Path] = []
        self._list = b""

    def open(self, task: PutTask) -> tuple[str, WholeSource]:
        """Return a name for the content, and the content. Blocks, so call it on a worker thread.

        Raises RpcError(missing).
        """
        try:
            index = split_task_id(task.task_id)[2]
            if not self._is_distributed:
                raise IndexError("policy.distribute is false")
            with self._lock:
                if not self._list:
                    distributed = distribution.files(document.plain(self._file.read_text(encoding="utf-8")))
                    self._paths = [path for _, path in distributed]
                    self._list = msgspec.json.encode([file for file, _ in distributed])
            if index == 0:
                return "list", WholeSource(memoryview(self._list))
            path = self._paths[index - 1]
            with path.open("rb") as file:
                return str(path), WholeSource(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except (OSError, IndexError, ValueError) as error:  # ValueError: an empty file
            raise RpcError(ErrorCode.MISSING, f"{self._name}: {task.task_id}: {error}", names=[task.task_id]) from None
