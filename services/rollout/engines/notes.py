"""When an engine shows what it has of a block so far. Must never decide what is kept of it."""

from __future__ import annotations

import time

from services.rollout.engine import Generation, Watch


class Notes:
    """When to show what a block has so far; `first`: the number of its first prompt among all that were asked for."""

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
