"""Manages the files of `samples/`: appends the records of whole tasks, each task once, and enforces the byte limit.

A killed recorder may leave the last task of a file incomplete. The next recorder removes that task's lines before it
appends to the file.
"""

from __future__ import annotations

import contextlib
import heapq
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.names import number
from shared.samples.record import DISCARDED, SUFFIX, SampleRecord, file_of

OPEN_FILES = 8
"""Maximum number of files whose tasks are remembered. Other files are read again."""


class _Line(msgspec.Struct):
    """The record fields that show the lineage of a task and whether the task is complete."""

    task: str
    samples: int = 1
    lineage: int = 0


_line = msgspec.json.Decoder(_Line).decode


class SampleFiles:
    """Writes `samples/`. Only one process may do so at a time."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self.limit_bytes = limit_bytes
        self._sizes = {path: path.stat().st_size for path in folder.rglob(f"*{SUFFIX}")}
        self._oldest = [(self._rank(path), path) for path in self._sizes]
        """A heap of the files in the order in which they are removed. It may still contain files that are gone."""
        heapq.heapify(self._oldest)
        self.nbytes = sum(self._sizes.values())
        """Total size of the files."""
        self._tasks: dict[Path, set[str]] = {}
        """Tasks by file, for the most recently written files."""
        self.removed = 0
        """Number of files removed to stay within the limit."""
        self.left_out = 0
        """Number of tasks that were not written because their file alone would exceed the limit."""

    def append(self, records: Sequence[SampleRecord]) -> bool:
        """Append all records of one task in one write. Return False without changing anything if the task is already
        there.

        A task is also left out if its file alone would then exceed the limit, unless the task is the file's first.
        Raises OSError if the disk is full; the file is then unchanged.
        """
        first = records[0]
        path = self._folder / file_of(first.split, first.step or 0)
        tasks = self._known(path)
        if first.task in tasks:
            return False
        data = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        if tasks and self._sizes.get(path, 0) + len(data) > self.limit_bytes:
            self.left_out += 1
            return False
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            before = self._sizes.get(path, 0)
            try:
                written = os.write(descriptor, data)
                if written != len(data):
                    raise OSError(f"{path}: wrote {written} of {len(data)} bytes; is the disk full?")
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)
        self._resize(path, before + len(data))
        tasks.add(first.task)
        self._trim(path)
        return True

    def discard(self, lineage: int, step: int) -> int:
        """Move the files of steps and versions after `step` to `discarded/`. Return the number of moved files.

        Files of lineages after `lineage`, files whose first record is incomplete, and files that an earlier call has
        moved stay where they are.
        """
        moved = 0
        for path in list(self._sizes):
            relative = path.relative_to(self._folder)
            if relative.parts[0] == DISCARDED or _step(path) <= step or not self._is_of(path, lineage):
                continue
            target = self._folder / DISCARDED / str(lineage) / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
            self._resize(target, self._forget(path))
            moved += 1
        return moved

    def _known(self, path: Path) -> set[str]:
        """Return the tasks of a file. If the file's last task is incomplete, remove that task first."""
        tasks = self._tasks.pop(path, None)
        if tasks is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            tasks = self._repaired(path)
        self._tasks[path] = tasks
        while len(self._tasks) > OPEN_FILES:
            del self._tasks[next(iter(self._tasks))]
        return tasks

    def _repaired(self, path: Path) -> set[str]:
        """Truncate the file after its last complete task, and return its tasks."""
        counts: Counter[str] = Counter()
        complete: set[str] = set()
        good = 0
        end = 0
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                end += len(line)
                try:
                    row = _line(line)
                except msgspec.DecodeError:
                    continue
                counts[row.task] += 1
                if counts[row.task] >= row.samples and line.endswith(b"\n"):
                    complete.add(row.task)
                    good = end
        if good < end:
            os.truncate(path, good)
            self._resize(path, good)
        return complete

    def _resize(self, path: Path, nbytes: int) -> None:
        if path not in self._sizes:
            heapq.heappush(self._oldest, (self._rank(path), path))
        self.nbytes += nbytes - self._sizes.get(path, 0)
        self._sizes[path] = nbytes

    def _forget(self, path: Path) -> int:
        """Forget a file that has been moved or removed, and return its size."""
        size = self._sizes.pop(path)
        self.nbytes -= size
        self._tasks.pop(path, None)
        return size

    def _is_of(self, path: Path, lineage: int) -> bool:
        """Return whether the file's first record is of `lineage` or an earlier one."""
        try:
            with path.open("rb") as file:
                return _line(file.readline()).lineage <= lineage
        except (OSError, msgspec.DecodeError):
            return False

    def _trim(self, newest: Path) -> None:
        """Remove files until the limit is met: discarded files first, then the oldest steps. Never removes `newest`."""
        while self.nbytes > self.limit_bytes and self._oldest[0][1] != newest:
            _, path = heapq.heappop(self._oldest)
            if path in self._sizes:
                path.unlink(missing_ok=True)
                self._forget(path)
                self.removed += 1

    def _rank(self, path: Path) -> tuple[bool, int]:
        """Return the key by which files are removed, lowest first."""
        return path.relative_to(self._folder).parts[0] != DISCARDED, _step(path)


def _step(path: Path) -> int:
    return number(path.stem) or 0
