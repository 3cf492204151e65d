"""Decides when an engine shows an unfinished block. What is kept of it is decided elsewhere."""

from __future__ import annotations

import time

from services.rollout.engine import Generation, Watch


class Notes:
    """The times at which to show a block. `first` is the number of its first prompt among all requested ones."""

    def __init__(self, watch: Watch, first: int) -> None:
        self._watch = watch
        self._first = first
        self._due = time.monotonic() + watch.every_s

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._due

    def take(self, groups: list[list[Generation]]) -> None:
        self._watch.note(self._first, groups)
        self._due = time.monotonic() + self._watch.every_s
