"""Runs checkpoints, which copy the journal's write-ahead log into its file, on a separate thread and connection.

Copying and syncing can take a long time and would otherwise delay the writer. SQLite restarts the log once a pass has
copied all of it and nothing has been written in the meantime. If writing never paused, the log would grow without
limit, so beyond `HARD_BYTES` the writer runs a pass itself.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from pathlib import Path

SOFT_BYTES = 16 << 20
"""Growth of the log, in bytes, that triggers a pass."""
HARD_BYTES = 512 << 20
"""Size of the log, in bytes, beyond which the writer runs a pass itself."""
PASSES = 3
"""Maximum number of consecutive passes. Data written during a pass is left to the next pass."""
_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"


class WalCheckpoints:
    """Checkpoints for a database in WAL mode whose single writer has automatic checkpoints turned off."""

    def __init__(self, path: Path, page_bytes: int) -> None:
        self.error = ""
        """The cause of a failed pass, or an empty string."""
        self._path = path
        self._page_bytes = page_bytes
        self._written = 0
        self._left_bytes = 0
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._running = False
        self._thread = threading.Thread(target=self._run, name="wal-checkpoints", daemon=True)
        self._thread.start()

    def wrote(self, nbytes: int, db: sqlite3.Connection) -> None:
        """Record that the writer has committed `nbytes` through `db`.

        Raises sqlite3.Error if the writer's own pass fails.
        """
        self._written += nbytes
        if self._written < SOFT_BYTES or self._running:
            return
        self._left_bytes += self._written
        self._written = 0
        if self._left_bytes > HARD_BYTES:
            self._pass(db)
            return
        self.order()

    def order(self) -> None:
        """Have the thread run a pass, which syncs everything committed so far."""
        self._running = True
        self._orders.put(True)

    def close(self) -> None:
        """Wait for the pass in progress and stop the thread."""
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
        """Copy the log into the file and return the number of bytes left for another pass."""
        pages, copied = map(int, db.execute(_CHECKPOINT).fetchone()[1:])
        self._left_bytes = pages * self._page_bytes if copied < pages else 0
        return (pages - copied) * self._page_bytes
