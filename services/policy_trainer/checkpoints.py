"""Decides which states of the workers are kept: after which steps they keep a snapshot in shared memory, and which
checkpoints stay in a run directory.

A step can be resumed only if every trained model has a checkpoint of it, so workers only write checkpoints. The driver
deletes older ones once all models have saved a newer one, and when it starts, in case the driver before it was killed
in between.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from shared.checkpoint_files import made_at_stop
from shared.rundir import CHECKPOINT_PREFIX, checkpoint_steps

_REMOVED = ".removed"
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


class Checkpoints:
    """The checkpoints of all trained models of a run. Methods block."""

    def __init__(self, folders: Sequence[Path], *, keep_last: int, keep_every: int | None) -> None:
        """`folders` hold the checkpoints of one model each. The newest `keep_last` steps are kept, and the multiples of
        `keep_every`."""
        self._folders = folders
        self._keep_last = keep_last
        self._keep_every = keep_every

    def steps(self) -> list[int]:
        """Return the steps of which every model has a checkpoint, ascending."""
        return sorted(set.intersection(*(set(checkpoint_steps(folder)) for folder in self._folders)))

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints of steps after `step`, which were rolled back."""
        for folder in self._folders:
            self._remove(folder, [later for later in checkpoint_steps(folder) if later > step])

    def prune(self, newest: int, keep: Collection[int] = ()) -> list[int]:
        """Delete the checkpoints before step `newest`, of which every model has one, that need not be kept. Return the
        steps that remain, up to `newest`.

        Kept are the newest `keep_last` steps of which every model has a checkpoint, the multiples of `keep_every`, and
        the steps in `keep`. A checkpoint that was saved because the run was stopping does not count towards
        `keep_last` and is deleted like any other once there is a newer one. A later step is left alone, because its
        checkpoint may still be incomplete.
        """
        regular = (step for step in reversed(self.steps()) if step <= newest and not self._made_at_stop(step))
        kept = {newest, *itertools.islice(regular, self._keep_last), *keep}
        for folder in self._folders:
            older = [step for step in checkpoint_steps(folder) if step < newest and step not in kept]
            self._remove(folder, [step for step in older if not self._keep_every or step % self._keep_every])
        return [step for step in self.steps() if step <= newest]

    def _made_at_stop(self, step: int) -> bool:
        return made_at_stop(self._folders[0] / f"{CHECKPOINT_PREFIX}{step}")

    def _remove(self, folder: Path, steps: Collection[int]) -> None:
        """Hide the checkpoints of `steps`, then delete all hidden ones, also those of a driver that was killed."""
        for step in steps:
            (folder / f"{CHECKPOINT_PREFIX}{step}").rename(folder / f".{CHECKPOINT_PREFIX}{step}{_REMOVED}")
        for hidden in folder.glob(f".{CHECKPOINT_PREFIX}*{_REMOVED}"):
            shutil.rmtree(hidden, ignore_errors=True)
