"""The mark beside the journal, which records what the journal held at its last commit.

SQLite replays a shortened write-ahead log without an error, as a shorter history. The mark, which is written after each
commit, reveals such a loss. The mark is not synced. It survives if the process is killed. A power cut can leave an
older mark, but that mark names only events that the journal also contains. Two slots are written alternately, so a torn
write leaves the previous mark intact.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

SLOT_BYTES = 512
"""Distance between the slots, which puts them in different sectors of the disk."""
_SLOTS = 2
_FIELDS = struct.Struct("<8sQq16sqqq")
_MAGIC = b"rlbusmrk"
_DIGEST_BYTES = 16


class Reached(NamedTuple):
    """The sequence number and chain of the last event, and the highest fence, lineage and committed step."""

    seq: int
    chain: bytes
    fence: int
    lineage: int
    step: int


class Mark:
    """An open mark file. `found` is the mark of the previous life, or None if it cannot be read."""

    def __init__(self, path: Path) -> None:
        """Open or create the mark file. Raises OSError."""
        self._folder = path.parent
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data = os.pread(self._fd, _SLOTS * SLOT_BYTES, 0)
        self.missing = not data
        """Whether there was no mark, as in a new run or beside a copied journal."""
        slots = [_unpacked(data[at : at + SLOT_BYTES]) for at in range(0, _SLOTS * SLOT_BYTES, SLOT_BYTES)]
        self._number = 0
        self.found: Reached | None = None
        for slot in slots:
            if slot is not None and slot[0] > self._number:
                self._number, self.found = slot

    def write(self, reached: Reached) -> None:
        """Replace the older slot. Raises OSError."""
        self._number += 1
        fields = _FIELDS.pack(_MAGIC, self._number, *reached)
        slot = fields + xxhash.xxh3_128_digest(fields)
        if os.pwrite(self._fd, slot, self._number % _SLOTS * SLOT_BYTES) != len(slot):
            raise OSError("the mark was only partly written; is the disk full?")

    def create(self, reached: Reached) -> None:
        """Write the first mark and make the file durable, so that a power cut cannot remove it. Raises OSError."""
        self.write(reached)
        os.fsync(self._fd)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unpacked(slot: bytes) -> tuple[int, Reached] | None:
    """Return the number and content of a slot, or None if its checksum does not match."""
    fields, digest = slot[: _FIELDS.size], slot[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES]
    if len(fields) < _FIELDS.size or xxhash.xxh3_128_digest(fields) != digest:
        return None
    magic, number, *reached = _FIELDS.unpack(fields)
    return (number, Reached(*reached)) if magic == _MAGIC else None
