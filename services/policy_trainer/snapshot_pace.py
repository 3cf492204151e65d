"""Decides after which steps the workers keep a snapshot of their state in shared memory."""

from __future__ import annotations

SHARE = 0.01
"""Maximum fraction of the run's time that snapshots may take up in the long run."""
BURST_S = 0.1
"""Maximum amount of unused time, in seconds, that is kept for later snapshots, so that a single slow one does not delay
the next."""


class SnapshotPace:
    """Allows a snapshot every few steps, or less often if snapshots would otherwise take more than `SHARE` of the
    time."""

    def __init__(self, every: int | None) -> None:
        """`every` is the minimum number of steps between snapshots, or None for no snapshots."""
        self._every = every
        self._left_s = BURST_S
        self._at_s: float | None = None

    def due(self, step: int, now_s: float) -> bool:
        """Return whether the state after `step` should be kept. `now_s` is the time of a monotonic clock."""
        if self._at_s is not None:
            self._left_s = min(self._left_s + SHARE * (now_s - self._at_s), BURST_S)
        self._at_s = now_s
        return self._every is not None and step % self._every == 0 and self._left_s > 0

    def kept(self, seconds: float) -> None:
        """Record that a snapshot took `seconds`."""
        self._left_s -= seconds
