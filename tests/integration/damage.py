"""Flips bits of stored shards, in a store's files. Asserts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from proto import blockfile
from proto.blockfile import HEADER_BYTES
from proto.errors import WireError
from proto.ids import revised_name


def flip(file: Path, offset: int) -> None:
    """Flip one bit of a file in place, because other processes may have mapped the file."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def shards(folder: Path) -> Iterator[tuple[Path, str, str, int]]:
    """Yield the file, task id, key (without its revision) and offset of each non-empty shard in the sealed files."""
    for file, table in _tables(folder):
        for index, task_id in enumerate(table.task_ids):
            for shard in table.shards(index):
                if shard.nbytes:
                    yield file, task_id, revised_name(shard.key) or shard.key, shard.offset


def fenced_keys(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the task id, fence and key (without its revision) of each shard in the sealed files."""
    for _, table in _tables(folder):
        for index, (task_id, fence) in enumerate(zip(table.task_ids, table.fences, strict=True)):
            for shard in table.shards(index):
                yield task_id, fence, revised_name(shard.key) or shard.key


def _tables(folder: Path) -> Iterator[tuple[Path, blockfile.Table]]:
    for file in folder.glob("*.blk"):
        try:
            data = file.read_bytes()
            yield file, blockfile.parse(data, len(data))
        except (FileNotFoundError, WireError):  # The file was collected meanwhile.
            continue


def flip_shard(folder: Path, key: str, wanted: Callable[[str], bool]) -> str:
    """Flip a bit in shard `key` of the first task for which `wanted` returns true. Return the task id, or "" if there
    is no such task."""
    for file, task_id, found, offset in shards(folder):
        if found == key and wanted(task_id):
            flip(file, offset)
            return task_id
    return ""


def flip_header(file: Path) -> None:
    """Flip a bit in a file's table."""
    flip(file, HEADER_BYTES)
