"""Decides after which steps the workers keep a snapshot of their state in shared memory."""

from __future__ import annotations

SHARE = 0.01
"""Maximum part of the time that is spent on snapshots."""


class SnapshotPace:
    """Every few steps, but seldom enough that writing takes at most `SHARE` of the time."""

    def __init__(self, every: int | None) -> None:
        """`every` is the minimum number of steps between snapshots, or None for no snapshots."""
        self._every = every
        self._not_before_s = 0.0

    def due(self, step: int, now_s: float) -> bool:
        """Return whether the state after `step` is to be kept. `now_s` is the time of any steady clock."""
        return self._every is not None and step % self._every == 0 and now_s >= self._not_before_s

    def kept(self, seconds: float, now_s: float) -> None:
        """Note that a snapshot was written in `seconds`."""
        self._not_before_s = now_s + seconds * (1 / SHARE - 1)
