"""Makes room in memory by moving sealed files to a folder on disk.

A move copies the file, syncs the copy, and verifies it by reading it back. Then it renames the copy to the sealed name,
updates the index, and turns the file in memory into a zombie, all without interruption, on the event loop's thread.
Before the rename, the file in memory is authoritative; after it, the file on disk is. A kill at any instant leaves the
whole file in at least one place, and a restart keeps one copy.
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
"""After the disk has failed (because it is full or broken), no file is moved for this many seconds. In the meantime,
puts are answered with BUSY."""
_OWNER = "owner"


def spill_folder(name: str, spill: str, run: RunDir, instance: str) -> Path:
    """Return the folder of one store under `spill`, after deleting the folders of dead runs on this host.

    The run's folder in `spill` has the same name as its folder in shared memory. A file in it identifies the host and
    the parent of the folder in shared memory, because only a process that sees the same parent can determine whether
    the run has ended. Folders from other hosts are logged and left in place. A link in the run's folder in shared
    memory points to the spilled files, so that they are removed together (`RunDir.remove_volatile`).
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
            "spill folders from other hosts, or from this one before a reboot, are kept: delete those that no run uses",
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
    except FileNotFoundError:  # deleted by its owner in the meantime
        return ""


class Spiller:
    """Moves one file at a time. Use it only on the store's event loop."""

    def __init__(self, name: str, index: StoreState, files: StoreFiles, retirement: Retirement) -> None:
        self._index = index
        self._files = files
        self._retirement = retirement
        self._log = structlog.get_logger(name)
        self._move_lock = asyncio.Lock()
        self._resume_at = 0.0
        self._move: asyncio.Task[bool] | None = None

    async def make_room(self, put_id: str, nbytes: int, deadline: float) -> None:
        """Move files until this put fits, no file can be moved, or the loop's time reaches `deadline`."""
        loop = asyncio.get_running_loop()
        while self._index.lacks_room(put_id, nbytes) and loop.time() < deadline:
            async with self._move_lock:
                if not self._index.lacks_room(put_id, nbytes):
                    return
                # Cancelling the caller must not cancel a copy under way.
                self._move = asyncio.ensure_future(self._move_one())
                if not await asyncio.shield(self._move):
                    return

    async def close(self) -> None:
        """Wait for the copy under way, so that its descriptor numbers are not reused before it ends."""
        if self._move is not None:
            await asyncio.wait({self._move})

    async def _move_one(self) -> bool:
        """Move one file. Returns whether a file has left memory; readers may still map it."""
        loop = asyncio.get_running_loop()
        put_id = self._index.begin_move() if loop.time() >= self._resume_at else None
        if put_id is None:
            return False
        try:
            copied = await asyncio.to_thread(self._files.copy_to_disk, put_id)
            moved = copied and self._index.place_of(put_id) is not None  # its tasks may have been cleared meanwhile
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
            self._log.error("spilled file reads back differently, kept in memory", put_id=put_id, error=str(error))
            return False
        if moved:
            self._retirement.take([self._index.end_move(put_id)])
        else:
            self._index.give_up_move(put_id, retry=False)
            self._retirement.settle()
        return True
