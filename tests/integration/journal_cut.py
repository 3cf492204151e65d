"""Simulates a power cut by truncating the log of a journal anywhere after the part that SQLite has synced. Asserts
nothing."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import struct
import tempfile
from pathlib import Path

from services.scheduler.journal_files import Mark

_LOG_HEADER, _FRAME_HEADER = struct.Struct(">6I"), struct.Struct(">4I")
_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
_COPIED = struct.Struct("=I28xI")
_COPIED_AT = 96
"""Offset, in the log's shared memory, of two numbers: nBackfill is the number of frames that were copied into the
database, and nBackfillAttempted also counts the frames of a copy that a kill interrupted. SQLite syncs the log before
it copies, so a power cut does not lose any of these frames."""


def cut(journal: Path, chance: random.Random, least: float = 0.0, most: float = 1.0) -> bool:
    """Cut the log of a journal that no process has open. Of the frames that have not yet been copied into the database,
    a fraction between `least` and `most` is removed.

    If all frames have been copied, change nothing and return False.
    """
    log, frames, copied, frame_bytes = _frames(journal)
    if frames <= copied:
        return False
    lost = max(int((frames - copied) * chance.uniform(least, most)), 1)
    os.truncate(log, _LOG_HEADER_BYTES + (frames - lost) * frame_bytes + chance.randrange(frame_bytes))
    return True


def can_be_cut(journal: Path) -> bool:
    """Return whether the log has frames that have not yet been copied into the database."""
    _, frames, copied, _ = _frames(journal)
    return frames > copied


def reaches_its_mark(journal: Path) -> bool:
    """Return whether the journal still holds the commit that its mark names. A kill can hit between a commit and its
    mark. Nobody notices the loss of such a commit, because nobody was told of it."""
    with tempfile.TemporaryDirectory() as folder:
        for file in journal.parent.glob(f"{journal.name}*"):
            shutil.copy(file, folder)
        copy = Path(folder) / journal.name
        with contextlib.closing(sqlite3.connect(copy)) as db:
            query = "SELECT max(seq) FROM (SELECT seq FROM events UNION SELECT seq FROM snapshot)"
            (last,) = db.execute(query).fetchone()
        with contextlib.closing(Mark(copy.with_name(f"{copy.name}-mark"))) as mark:
            assert mark.found is not None
            return last >= mark.found.seq


def _frames(journal: Path) -> tuple[Path, int, int, int]:
    """Return the log, its number of frames, how many of them have been copied into the database, and the size of a
    frame."""
    log = journal.with_name(f"{journal.name}-wal")
    data = log.read_bytes()
    _, _, page_bytes, _, *salts = _LOG_HEADER.unpack_from(data)
    frame_bytes = _FRAME_HEADER_BYTES + page_bytes
    frames = 0
    while (at := _LOG_HEADER_BYTES + frames * frame_bytes) + frame_bytes <= len(data):
        if list(_FRAME_HEADER.unpack_from(data, at)[2:]) != salts:
            break  # The frame is left over from before the log was restarted.
        frames += 1
    copied = _COPIED.unpack_from(journal.with_name(f"{journal.name}-shm").read_bytes(), _COPIED_AT)
    return log, frames, max(copied), frame_bytes
