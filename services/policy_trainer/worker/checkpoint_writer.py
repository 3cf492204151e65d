"""Writes checkpoints on a separate thread while the next step is computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from proto.messages import Saved
from shared.rundir import checkpoint_steps

if TYPE_CHECKING:
    from services.policy_trainer.worker.checkpoint import SavedState


class CheckpointWriter:
    """Writes one checkpoint at a time. Use it only on the event loop."""

    def __init__(self, folder: Path, keep_every: int | None) -> None:
        """`folder` holds the run's checkpoints. Saving a later step never deletes those at multiples of
        `keep_every`."""
        self._folder = folder
        self._keep_every = keep_every
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: set[asyncio.Task[None]] = set()

    def begin(
        self,
        state: SavedState,
        keep_last: int,
        keep: Collection[int],
        on_saved: Callable[[Saved], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        """Begin to write a checkpoint. Once it is complete, delete the checkpoints older than the newest `keep_last`,
        except those of the steps in `keep`."""
        task = asyncio.create_task(self._save(state, keep_last, keep, on_saved, on_error))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(
        self,
        state: SavedState,
        keep_last: int,
        keep: Collection[int],
        on_saved: Callable[[Saved], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        from services.policy_trainer.worker import checkpoint

        def write() -> tuple[Path, list[int]]:
            path = checkpoint.save(self._folder, state, keep_last=keep_last, keep_every=self._keep_every, keep=keep)
            return path, checkpoint_steps(self._folder)

        began = time.perf_counter()
        try:
            path, kept = await asyncio.get_running_loop().run_in_executor(self._thread, write)
        except Exception as error:
            on_error(error)
        else:
            on_saved(Saved(path=str(path), seconds=time.perf_counter() - began, kept=kept))

    async def close(self) -> None:
        """Wait for the checkpoints that are being written."""
        if self._saving:
            await asyncio.wait(self._saving)
        self._thread.shutdown(wait=False)
