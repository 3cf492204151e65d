"""Makes room in memory by moving sealed files to a folder on disk. It must never leave a file in neither place.

A move is: copy, fsync, read back and verify, rename to the sealed name, change the index, make the file in memory a
zombie. The last three happen at once on the loop's thread; before them the file in memory is the truth, after the
rename the one on disk. A kill at any instant leaves the whole file in at least one place, and a restart keeps one.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import structlog

from proto.errors import WireError
from services.batch_store.files import StoreFiles
from services.batch_store.retirement import Retirement
from services.batch_store.state import StoreState
from shared.rundir import RunDir, folder_id

PAUSE_S = 1.0
"""A disk that refused (full, broken) is left alone for so long: puts are BUSY meanwhile."""
_OWNER = "owner"


def spill_folder(name: str, spill: str, run: RunDir, instance: str) -> Path:
    """The folder of one store of one run under `spill`; what dead runs of this host left there is deleted.

    The run's part of `spill` is named as its shared memory, and a file there says in which folder of which host that
    lies: only who sees that same folder knows whether the run is over. What others left is theirs, it is only told.
    A link leads back, so that whoever removes the shared memory finds what was spilled (`RunDir.remove_volatile`).
    """
    root, here = Path(spill), folder_id(run.shm.parent)
    foreign: list[str] = []
    for mark in root.glob(f"*/{_OWNER}"):
        folder = mark.parent
        if _read(mark) != here:
            foreign.append(folder.name)
        elif not (run.shm.parent / folder.name).exists():
            shutil.rmtree(folder, ignore_errors=True)
    if foreign:
        structlog.get_logger(name).info(
            "spilled by other hosts, or by this one before it was started anew: left alone, delete what no run uses",
            spill=spill,
            folders=sorted(foreign)[:64],
        )
    mine = root / run.shm.name
    mine.mkdir(mode=0o700, parents=True, exist_ok=True)
    (mine / _OWNER).write_text(here)
    if not run.spill_link.is_symlink():
        run.spill_link.symlink_to(mine)
    return mine / instance


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # deleted by its owner meanwhile
        return ""


class Spiller:
    """Moves one file at a time; belongs to the store's event loop."""

    def __init__(self, name: str, index: StoreState, files: StoreFiles, ended: Retirement) -> None:
        self._index = index
        self._files = files
        self._ended = ended
        self._log = structlog.get_logger(name)
        self._one_at_a_time = asyncio.Lock()
        self._resume_at = 0.0
        self._move: asyncio.Task[bool] | None = None

    async def make_room(self, put_id: str, nbytes: int, deadline: float) -> None:
        """Move files until this put fits, nothing moves any more, or the loop's time is `deadline`."""
        loop = asyncio.get_running_loop()
        while self._index.lacks_room(put_id, nbytes) and loop.time() < deadline:
            async with self._one_at_a_time:
                if not self._index.lacks_room(put_id, nbytes):
                    return
                # a caller that goes away does not undo a copy that is under way
                self._move = asyncio.ensure_future(self._move_one())
                if not await asyncio.shield(self._move):
                    return

    async def close(self) -> None:
        """Wait for the copy that is under way, so that nobody else uses its descriptors."""
        if self._move is not None:
            await asyncio.wait({self._move})

    async def _move_one(self) -> bool:
        """True: a file has left memory (though readers may still map it)."""
        loop = asyncio.get_running_loop()
        put_id = self._index.begin_move() if loop.time() >= self._resume_at else None
        if put_id is None:
            return False
        try:
            copied = await asyncio.to_thread(self._files.copy_to_disk, put_id)
            moved = copied and self._index.wanted(put_id)
            if moved:
                self._files.finish_copy(put_id)
            elif copied:
                self._files.drop_copy(put_id)
        except OSError as error:
            self._resume_at = loop.time() + PAUSE_S
            self._index.give_up_move(put_id, retry=True)
            self._log.error("spill refused by the disk", put_id=put_id, error=str(error))
            return False
        except WireError as error:
            self._index.give_up_move(put_id, retry=False)
            self._log.error("spilled file reads back differently, it stays in memory", put_id=put_id, error=str(error))
            return False
        if moved:
            self._ended.take([self._index.end_move(put_id)])
        else:
            self._index.give_up_move(put_id, retry=False)
            self._ended.settle()
        return True
