"""Keeps a store's list of tombstones: a file with one line per tombstone, appended before the clear takes effect."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import structlog

from proto.ids import check_task_id
from proto.messages import PutTask


class TombstoneList:
    """The list in the file `path`. One process writes it at a time."""

    def __init__(self, name: str, path: Path) -> None:
        """`name` is the name of the store, for the log."""
        self._name = name
        self._path = path
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._lines = 0
        self.incomplete = False
        """Whether tombstones are missing from the list because there was no room. `compact` writes them."""

    def append(self, tasks: Iterable[PutTask]) -> None:
        """Append tombstones durably, all or none. If this raises OSError (because there is no room), the list is
        `incomplete`."""
        lines = [f"{task.fence} {task.task_id}\n" for task in tasks]
        if not lines:
            return
        data = "".join(lines).encode()
        before = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) < len(data):
                os.ftruncate(self._file, before)
                raise OSError(errno.ENOSPC, "no room for tombstones", str(self._path))
        except OSError:
            self.incomplete = True
            raise
        self._lines += len(lines)

    def compact(self, tombstones: dict[str, int]) -> None:
        """Rewrite the list if tombstones are missing from it or most of its lines are out of date.

        `tombstones` maps task ids to fences. If this raises OSError, the existing list remains in use.
        """
        if not self.incomplete and self._lines <= 2 * len(tombstones) + 4096:
            return
        lines = (f"{fence} {task_id}\n" for task_id, fence in tombstones.items())
        before = self._file
        self._file = replace(self._path, "".join(lines))
        os.close(before)
        self._lines = len(tombstones)
        self.incomplete = False

    def read(self) -> list[PutTask]:
        """Return the tombstones of earlier incarnations, oldest first. A torn last line, which was never acknowledged,
        is cut off.
        Damaged lines are skipped and logged, so that the store can still serve its other shards.
        """
        text = self._path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) != len(text):
            os.truncate(self._path, len(whole))
        tombstones: list[PutTask] = []
        lines = whole.decode(errors="replace").split("\n")[:-1]
        for line in lines:
            fence, _, task_id = line.partition(" ")
            try:
                tombstones.append(PutTask(check_task_id(task_id), int(fence)))
            except ValueError as error:  # WireError is one
                structlog.get_logger(self._name).error("damaged tombstone skipped", line=line[:200], why=str(error))
        self._lines = len(lines)
        return tombstones

    def close(self) -> None:
        """Close the descriptor. The list is kept."""
        os.close(self._file)


def replace(path: Path, text: str) -> int:
    """Replace a small file atomically and return a descriptor that appends to it. If an error occurs, the old file
    stays in place."""
    scratch = path.with_name(f"{path.name}.new")
    descriptor = os.open(scratch, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", closefd=False) as stream:
            stream.write(text)
        scratch.replace(path)
    except BaseException:
        os.close(descriptor)
        scratch.unlink(missing_ok=True)  # frees the room that the scratch file took up
        raise
    return descriptor
