"""Simulates a power cut: the log of a journal ends anywhere after the part that SQLite has synced. Asserts nothing."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

_LOG_HEADER, _FRAME_HEADER = struct.Struct(">6I"), struct.Struct(">4I")
_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_COPIED = struct.Struct("=I")
_COPIED_AT = 96
"""Offset of nBackfill, the number of frames that were copied into the database, in the log's shared memory."""


def cut(journal: Path, chance: random.Random, least: float = 0.0, most: float = 1.0) -> bool:
    """Cut the log of a journal that no process has open. Of the frames that are not yet copied into the database, a
    share between `least` and `most` is removed.

    If all frames have been copied, change nothing and return False.
    """
    log, frames, copied, frame_bytes = _frames(journal)
    if frames <= copied:
        return False
    lost = max(int((frames - copied) * chance.uniform(least, most)), 1)
    os.truncate(log, _LOG_HEADER_BYTES + (frames - lost) * frame_bytes + chance.randrange(frame_bytes))
    return True


def can_be_cut(journal: Path) -> bool:
    """Return whether the log has frames that are not yet copied into the database."""
    _, frames, copied, _ = _frames(journal)
    return frames > copied


def _frames(journal: Path) -> tuple[Path, int, int, int]:
    """Return the log, its number of frames, how many of them are copied into the database, and the size of a frame."""
    log = journal.with_name(f"{journal.name}-wal")
    data = log.read_bytes()
    _, _, page_bytes, _, *salts = _LOG_HEADER.unpack_from(data)
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    frames = 0
    while (at := _LOG_HEADER_BYTES + frames * frame_bytes) + frame_bytes <= len(data):
        if list(_FRAME_HEADER.unpack_from(data, at)[2:]) != salts:
            break  # The frame is left over from before the log was restarted.
        frames += 1
    (copied,) = _COPIED.unpack_from(journal.with_name(f"{journal.name}-shm").read_bytes(), _COPIED_AT)
    return log, frames, copied, frame_bytes
