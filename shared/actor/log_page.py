"""Reads pages of a service's own log, to answer requests over the bus."""

from __future__ import annotations

import os
from pathlib import Path

TAIL_BYTES = 256 << 10


def page(path: Path, lines: int, position: int) -> tuple[list[str], int]:
    """Return whole lines and the position after them: from `position`, or the last `lines` lines if it is negative.

    Reads at most 256 KiB, so all lines after `position` may take several pages.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            begin = max(0, size - TAIL_BYTES) if position < 0 else position if position <= size else 0
            file.seek(begin)
            data = file.read(TAIL_BYTES)
    except OSError:
        return [], max(0, position)
    whole = data.rfind(b"\n") + 1 or (len(data) if len(data) == TAIL_BYTES else 0)  # a single line may fill a page
    found = data[:whole].decode(errors="replace").splitlines()
    return (found[-lines:] if lines > 0 else []) if position < 0 else found, begin + whole
