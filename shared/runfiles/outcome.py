"""How a run ended, as its supervisor recorded it, and whether a launcher still holds the run."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

LAUNCHER_LOCK = "launcher.lock"
"""File in a run directory that its launcher locks for as long as it lives."""


@dataclass(frozen=True)
class RecordedEnd:
    """The content of `RunDir.outcome`."""

    outcome: str
    """`done`, `stopped` or `failed`."""
    cause: str
    """The reason, or an empty string."""
    at: float
    """Unix time at which the run began to shut down."""


def read_outcome(run: Path) -> RecordedEnd | None:
    """Return how the run in `run` ended, or None if no supervisor has recorded it."""
    file = run / "outcome.json"
    try:
        content = json.loads(file.read_bytes())
        return RecordedEnd(str(content["outcome"]), str(content["cause"]), file.stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(run: Path) -> bool:
    """Return whether a launcher holds the run directory."""
    try:
        descriptor = os.open(run / LAUNCHER_LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
