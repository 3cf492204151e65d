"""Brings the journal's write-ahead log back into its file, on a thread and a connection of its own. It must never hold
up who writes: copying and syncing take as long as the disk likes.

SQLite begins the log anew by itself once a pass has copied all of it and nothing was written meanwhile. Under writing
that never pauses the log would grow, so past `HARD_BYTES` the writer makes one pass of its own.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from pathlib import Path

SOFT_BYTES = 16 << 20
"""So much more in the log is worth a pass and its syncs."""
HARD_BYTES = 512 << 20
PASSES = 3
"""What was written during a pass is left for the next one: so many at once."""
_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"


class WalCheckpoints:
    """Belongs to the one writer of a database in WAL mode that has automatic checkpoints turned off."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        self.error = ""
        """Why a pass failed, if one did."""
        self._path = path
        self._page_bytes = page_bytes
        self._written = 0
        self._left_bytes = 0
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running = False
        self._thread = threading.Thread(target=self._run, name="wal-checkpoints", daemon=True)
        self._thread.start()

    def wrote(self, nbytes: int, db: sqlite3.Connection) -> None:
        """The writer has committed so much through `db`. Raises sqlite3.Error when its own pass fails."""
        self._written += nbytes
        if self._written < SOFT_BYTES or self._running:
            return
        self._left_bytes += self._written
        self._written = 0
        if self._left_bytes > HARD_BYTES:
            self._pass(db)
            return
        self._running = True
        self._orders.put(True)

    def close(self) -> None:
        """Wait for the pass that is under way."""
        self._orders.put(False)
        self._thread.join()

    def _run(self) -> None:
        try:
            db = sqlite3.connect(self._path, isolation_level=None)
        except sqlite3.Error as error:
            self.error = str(error)
            return
        try:
            while self._orders.get():
                for _ in range(PASSES):
                    if not self._pass(db):
                        break
                self._running = False
        except sqlite3.Error as error:
            self.error = str(error)
        finally:
            db.close()

    def _pass(self, db: sqlite3.Connection) -> int:
        """Copy what is in the log; returns how many bytes of it are left for another pass."""
        pages, copied = map(int, db.execute(_CHECKPOINT).fetchone()[1:])
        self._left_bytes = pages * self._page_bytes if copied < pages else 0
        return (pages - copied) * self._page_bytes
