"""The scheduler's journal on disk: every durable event in order, periodic snapshots, and tables for human readers.

The file is an SQLite database in WAL mode, committed once per burst. Effects are carried out only after their event is
in the file. A snapshot replaces the events before it in one transaction. The journal does not interpret events. A
killed process loses nothing. Because of `synchronous=NORMAL`, a power cut can lose the last commits, but it never
reorders commits.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from proto.errors import WireError
from proto.messages import CheckpointSaved, ErrorCode, TaskState
from services.scheduler import earlier_journal, journal_files
from services.scheduler.events import (
    DiscardRows,
    Durable,
    ForgetSteps,
    Rewound,
    SaveStep,
    WriteRow,
    decode,
    encode,
)
from services.scheduler.journal_files import Mark, Reached
from services.scheduler.run_state import LAYOUT
from shared.rpc.errors import BadInput, RpcError

FORMAT = f"rlbus-scheduler-{LAYOUT}"
SNAPSHOT_BYTES = 8 << 20
"""A new snapshot is written after this many bytes of events, or after twice the size of the last snapshot if that is
more.

Replay is therefore bounded, and snapshots account for a constant fraction of all writing.
"""
SOFT_BYTES = 16 << 20
"""Growth of the write-ahead log, in bytes, after which it is copied into the file."""
HARD_BYTES = 512 << 20
"""Size of the log, in bytes, beyond which the writer copies it itself."""
PASSES = 3
"""Maximum number of consecutive passes. Data written during a pass is left to the next pass."""
FORGOTTEN_AT_ONCE = 1024
"""Maximum number of old steps that one transaction deletes. This bounds how long requests are delayed."""

_DAMAGE = (sqlite3.Error, struct.error, ValueError, TypeError, OverflowError)
"""Exceptions that reading damaged bytes raises. ValueError includes UnicodeDecodeError."""
_ENVIRONMENT = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
"""SQLite errors that say nothing about the content of the file."""
_BY_STEP = ("steps", "rows")
_REMEDY = "restore the file from a backup or begin a new run"


class _SnapshotRow(NamedTuple):
    """The newest complete snapshot: its last event, the chain at that event, and the number and chain of its parts."""

    seq: int
    chain: bytes
    parts: int
    last: bytes


class WalCheckpoints:
    """Passes that copy the journal's write-ahead log into its file, on a separate thread and connection.

    Copying and syncing can take a long time and would otherwise delay the writer. SQLite restarts the log once a pass
    has copied all of it and nothing has been written in the meantime. If writing never paused, the log would grow
    without limit, so beyond `HARD_BYTES` the writer runs a pass itself.
    """

    def __init__(self, path: Path, page_bytes: int) -> None:
        self._path = path
        self._page_bytes = page_bytes
        self._written = 0
        self._left_bytes = 0
        self._thread = ThreadPoolExecutor(1, "wal-checkpoints")
        self._passes: Future[None] | None = None

    def wrote(self, nbytes: int, db: sqlite3.Connection) -> None:
        """Record that the writer has committed `nbytes` through `db`. Raises sqlite3.Error if a pass has failed."""
        self._written += nbytes
        if self._passes is not None and self._passes.done():
            self._passes.result()
            self._passes = None
        if self._written < SOFT_BYTES or self._passes is not None:
            return
        self._left_bytes += self._written
        self._written = 0
        if self._left_bytes > HARD_BYTES:
            self._copy(db)
        else:
            self.order()

    def order(self) -> None:
        """Have the thread sync everything committed so far."""
        self._passes = self._thread.submit(self._run)

    def close(self) -> None:
        """Wait for the passes in progress and stop the thread."""
        self._thread.shutdown()

    def _run(self) -> None:
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as db:
            for _ in range(PASSES):
                if not self._copy(db):
                    break

    def _copy(self, db: sqlite3.Connection) -> int:
        """Run one pass, and return the number of bytes left for another pass."""
        pages, copied = map(int, db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1:])
        self._left_bytes = pages * self._page_bytes if copied < pages else 0
        return (pages - copied) * self._page_bytes


class Journal:
    """An open journal. `append` and `save` add to the transaction of the next `commit`."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Open or create the journal of the run with this plan fingerprint.

        Raises a one-line RpcError: BadInput if the file is not a journal, is damaged, or was written by another release
        or under another plan, and internal if the disk does not let it be used.
        """
        self._path = path
        with self._reading("the file"):
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.create_function("checksum", -1, journal_files.checksum)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=0")  # see `WalCheckpoints`
            page_bytes = self._db.execute("PRAGMA page_size").fetchone()[0]
            verdict = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._check_tables(fingerprint)
            kept, chain, *_ = self._snapshot_row()
            query = "SELECT seq, chain FROM events WHERE seq > ? ORDER BY seq DESC LIMIT 1"
            newest: tuple[int, bytes] | None = self._db.execute(query, (kept,)).fetchone()
            self.seq, self._chain = newest or (kept, chain)
            self._event_bytes = self._total("SELECT total(length(body)) FROM events WHERE seq > ?", kept)
            self._snapshot_bytes = self._total("SELECT total(length(body)) FROM parts WHERE seq = ?", kept)
        self._events: list[tuple[int, float, int, bytes, bytes]] = []
        self._saves: list[tuple[str, tuple[Any, ...]]] = []
        self._pending_bytes = 0
        """Bytes of the transaction that is being assembled."""
        self._sync = False
        self.fence = self.lineage = self.step = 0
        """The highest fence, lineage and committed step of the run, which each mark records."""
        try:
            self._mark = Mark(path.with_name(f"{path.name}-mark"))
            if self._mark.missing:
                self._mark.create(self._reached())
        except OSError as error:
            raise self._unwritable(str(error)) from None
        self.lost = self._lost()
        """The reason why the end of the journal counts as lost, in one line, or an empty string if it is complete."""
        self.unmarked = self._mark.missing and self.seq > 0
        """Whether the journal has no mark, in which case a lost end cannot be detected."""
        self._wal = WalCheckpoints(path, page_bytes)

    def _check_tables(self, fingerprint: str) -> None:
        """Create the tables of a new journal, or check those of an existing one. Raises RpcError."""
        schema = journal_files.schema(self._db)
        if not schema:
            rows = [("format", FORMAT), ("plan", fingerprint)]
            self._db.execute("BEGIN IMMEDIATE")
            journal_files.create(self._db)
            self._db.executemany(journal_files.SAVE_META, rows)
            self._db.execute("COMMIT")
        elif self._has_evals(schema):
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DROP TABLE evals")
            self._db.execute(journal_files.SAVE_META, ("format", earlier_journal.BEFORE))
            self._db.execute("COMMIT")
        elif "meta" not in (names := sorted(name for _, name, *_ in schema)):
            raise sqlite3.DatabaseError(f"it is not a scheduler's journal (tables {', '.join(names)})")
        elif schema != journal_files.expected_schema():
            written = dict(self._db.execute("SELECT key, value FROM meta")).get("format")
            if written != FORMAT:
                raise self.broken(
                    f"its format is {written!r}, but this release reads {FORMAT!r}; use the release that wrote it"
                )
            raise sqlite3.DatabaseError("its tables are not those of a journal")
        for table in journal_files.SUMMED:
            self._check_rows(table)
        meta = dict(self._db.execute("SELECT key, value FROM meta"))
        self.forgotten = journal_files.forgotten(meta)
        """The last step whose batch and metrics row have been deleted, or -1."""
        self._is_of_the_format_before = meta.get("format") == earlier_journal.BEFORE
        """Whether the snapshot, if there is one, is converted when it is read. The next one ends that."""
        if meta.get("format") not in (FORMAT, earlier_journal.BEFORE):
            raise self.broken(
                f"its format is {meta.get('format')!r}, but this release reads {FORMAT!r}; use the release that wrote "
                "it"
            )
        if meta.get("plan") != fingerprint:
            raise self.broken(
                "written with a different seed, data, staleness, stages or batch sizes, which cannot change within a "
                "run; start a new run"
            )

    def _has_evals(self, schema: list[tuple[str, ...]]) -> bool:
        rest = [entry for entry in schema if entry[2] != "evals"]
        if len(rest) == len(schema) or rest != journal_files.expected_schema():
            return False
        written = dict(self._db.execute("SELECT key, value FROM meta")).get("format")
        return written == earlier_journal.WITH_EVALS

    def _check_rows(self, table: str) -> None:
        """Raise RpcError if the checksum of any row in the table does not match."""
        with self._reading(f"table {table}"):
            columns = [name for _, name, *_ in self._db.execute(f"PRAGMA table_info({table})")][:-1]
            query = f"SELECT {columns[0]} FROM {table} WHERE sum IS NOT checksum({', '.join(columns)})"  # noqa: S608
            for (key,) in self._db.execute(query):
                raise ValueError(f"the checksum of row {key!r} does not match")

    def _snapshot_row(self) -> _SnapshotRow:
        row = self._db.execute("SELECT seq, chain, parts, last FROM snapshot").fetchone()
        return _SnapshotRow(*row) if row else _SnapshotRow(0, journal_files.START, 0, journal_files.START)

    def _total(self, query: str, seq: int) -> int:
        return int(self._db.execute(query, (seq,)).fetchone()[0])

    @contextlib.contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Convert errors raised while reading into an RpcError that names the file and, if the file is damaged,
        `what`."""
        try:
            yield
        except _DAMAGE as error:
            cause = "".join(char if char.isprintable() else "?" for char in " ".join(str(error).split()))[:200]
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _ENVIRONMENT:
                raise self._unreachable(f"cannot be read: {cause}") from None
            raise self.broken(f"{what} is damaged: {cause}; {_REMEDY}") from None

    def broken(self, cause: str) -> BadInput:
        """Return the error for a journal whose content cannot be used. It names the file."""
        return BadInput(f"journal {self._path}: {cause}"[:800])

    def _unreachable(self, cause: str) -> RpcError:
        """Return the error for a file that may be intact, but that the disk does not let this process use."""
        text = f"journal {self._path}: {cause}"[:700]
        return RpcError(ErrorCode.INTERNAL, f"{text}; make room or repair the disk, then resume the run")

    def _reached(self) -> Reached:
        return Reached(self.seq, self._chain, self.fence, self.lineage, self.step)

    @property
    def marked(self) -> Reached:
        """The mark of the previous life, or the last event in the journal if the mark is missing."""
        return self._mark.found or self._reached()

    def _lost(self) -> str:
        if self._mark.missing:
            return ""
        if self._mark.found is None:
            return "its mark cannot be read" if self.seq else ""
        seq, chain = self._mark.found[:2]
        if self.seq < seq:
            return f"it ends with event {self.seq}, but its mark names event {seq}"
        with self._reading(f"event {seq}"):
            kept = self._snapshot_row()
            rows = self._db.execute("SELECT chain FROM events WHERE seq = ?", (seq,)).fetchall()
        chains = [(kept.chain,)] if seq == kept.seq else rows
        return f"event {seq} is not the one that its mark names" if chains not in ([], [(chain,)]) else ""

    @property
    def has_snapshot(self) -> bool:
        return self._snapshot_row().seq > 0

    def snapshot(self) -> Iterator[bytes]:
        """Yield the parts of the newest snapshot. Raises RpcError if a part is missing or damaged."""
        seq, chain, parts, last = self._snapshot_row()
        for number in range(parts):
            with self._reading(f"part {number} of snapshot {seq}"):
                query = "SELECT body, chain FROM parts WHERE seq = ? AND part = ?"
                body, stored = self._db.execute(query, (seq, number)).fetchone() or (b"", b"")
                chain = journal_files.link(chain, seq, number, 0.0, body)
                if stored != chain:
                    raise ValueError("its checksum does not match")
                if number == 0 and self._is_of_the_format_before:
                    body = earlier_journal.converted(body)
            yield body
        if chain != last:
            raise self.broken(f"snapshot {seq} is damaged: its parts are not those that it names; {_REMEDY}")

    def events(self) -> Iterator[Durable]:
        """Yield every event after the snapshot, in order. Raises RpcError if an event is missing or damaged."""
        last, chain, *_ = self._snapshot_row()
        with self._reading(f"event {last + 1}"):
            events = self._db.execute(
                "SELECT seq, at, kind, body, chain FROM events WHERE seq > ? ORDER BY seq", (last,)
            )
        while True:
            with self._reading(f"event {last + 1}"):
                row = next(events, None)
                if row is None:
                    return
                seq, at, kind, body, stored = row
                if seq != last + 1:
                    raise ValueError("it is missing")
                chain = journal_files.link(chain, seq, kind, at, body)
                if chain != stored:
                    raise ValueError("its checksum does not match")
                last = seq
            try:
                event = decode(kind, body)
            except (WireError, msgspec.MsgspecError) as error:
                raise self.broken(f"event {last}: {error}; use the release that wrote it") from None
            yield event

    def check(self, rows: range, steps: int) -> None:
        """Raise RpcError unless the tables contain what the events imply.

        The events imply metrics rows for exactly the steps in `rows`, and batches for at least the first `steps` steps,
        except those that were forgotten.
        """
        first = self.forgotten + 1
        with self._reading("table rows"):
            written = {step for (step,) in self._db.execute("SELECT step FROM rows")}
            if wrong := written ^ {step for step in rows if step >= first}:
                raise ValueError(
                    f"the row for step {min(wrong)} is {'unexpected' if min(wrong) in written else 'missing'}"
                )
        with self._reading("table steps"):
            if wrong := set(range(max(first, 1), steps + 1)) - {
                step for (step,) in self._db.execute("SELECT step FROM steps")
            }:
                raise ValueError(f"the row for step {min(wrong)} is missing")

    def append(self, event: Durable, at: float) -> None:
        """Add a durable event. `at`, in seconds since 1970, is only for human readers."""
        kind, body = encode(event)
        self.seq += 1
        self._chain = journal_files.link(self._chain, self.seq, kind, at, body)
        self._event_bytes += len(body)
        self._pending_bytes += len(body)
        self._events.append((self.seq, at, kind, body, self._chain))
        self._sync = self._sync or isinstance(event, CheckpointSaved)

    def save(self, effect: SaveStep | WriteRow | Rewound | DiscardRows | ForgetSteps, at: float) -> None:
        """Add a row to a readable table, or remove rows of steps that were rolled back."""
        match effect:
            case SaveStep(state=TaskState.BATCHED):
                values: tuple[Any, ...] = (effect.step, effect.state, json.dumps(effect.task_ids), None, "{}")
                self._saves.append((journal_files.SAVE_STEP, values))
            case SaveStep():
                self._saves.append((journal_files.COMMIT_STEP, (effect.state, at, effect.step)))
            case WriteRow():
                self._saves.append((journal_files.SAVE_ROW, (effect.step, json.dumps(effect.row))))
            case Rewound():
                values = (effect.lineage, effect.step, effect.committed, at, effect.cause)
                self._saves.append((journal_files.SAVE_REWIND, values))
                self._saves.append((journal_files.TAKE_BACK, (effect.step,)))
            case DiscardRows():
                self._saves.append(("DELETE FROM rows WHERE step > ?", (effect.step,)))
                if effect.step < self.forgotten:
                    self._forget(effect.step)
            case ForgetSteps():
                if effect.step > self.forgotten:
                    self._forget(min(effect.step, self.forgotten + FORGOTTEN_AT_ONCE))
                    self._saves += [(f"DELETE FROM {name} WHERE step <= ?", (self.forgotten,)) for name in _BY_STEP]  # noqa: S608

    def _forget(self, step: int) -> None:
        """Note that exactly the batches and rows of the steps up to `step` have been deleted."""
        self.forgotten = step
        self._saves.append((journal_files.SAVE_META, (journal_files.FORGOTTEN, str(step))))

    @property
    def due(self) -> bool:
        """Whether enough events have been written since the last snapshot to begin a new one."""
        return self._event_bytes > max(SNAPSHOT_BYTES, 2 * self._snapshot_bytes)

    def commit(self) -> None:
        """Make everything added since the last commit durable.

        Raises an RpcError that names the file if the file cannot be written.
        """
        if not self._events and not self._saves:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", self._events)
            for statement, values in self._saves:
                self._db.execute(statement, values)
            self._end()
            self._mark.write(self._reached())
        except (sqlite3.Error, OSError) as error:
            raise self._unwritable(str(error)) from None
        self._events.clear()
        self._saves.clear()
        if self._sync:  # a power cut must not remove the newest checkpoint from the journal
            self._sync = False
            self._wal.order()

    def _end(self) -> None:
        """Commit a transaction and report its size to the WAL checkpoints."""
        self._db.execute("COMMIT")
        nbytes, self._pending_bytes = self._pending_bytes, 0
        self._wal.wrote(nbytes, self._db)

    def _unwritable(self, cause: str) -> RpcError:
        return self._unreachable(
            f"cannot be written: {cause}; this process has sent nothing that depends on unwritten events"
        )

    def write_snapshot(self, parts: Iterable[bytes]) -> None:
        """Replace the events so far, and the snapshot before, by a snapshot of the state after the last event.

        Raises an RpcError that names the file if the file cannot be written.
        """
        self.commit()
        last, rows = self._chain, []
        for number, body in enumerate(parts):
            last = journal_files.link(last, self.seq, number, 0.0, body)
            rows.append((self.seq, number, body, last))
        self._pending_bytes = self._snapshot_bytes = sum(len(body) for _, _, body, _ in rows)
        self._event_bytes = 0
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM parts")
            self._db.executemany("INSERT INTO parts VALUES (?, ?, ?, ?)", rows)
            self._db.execute(journal_files.SAVE_SNAPSHOT, (1, self.seq, self._chain, len(rows), last))
            self._db.execute("DELETE FROM events")
            self._db.execute(journal_files.SAVE_META, ("format", FORMAT))
            self._end()
        except sqlite3.Error as error:
            raise self._unwritable(str(error)) from None
        self._is_of_the_format_before = False

    def rows_after(self, step: int) -> Iterator[str]:
        """Yield the metrics rows of steps after `step`, as JSON, in order."""
        for (row,) in self._db.execute("SELECT row FROM rows WHERE step > ? ORDER BY step", (step,)):
            yield row

    def last_row(self) -> dict[str, float]:
        row = self._db.execute("SELECT row FROM rows ORDER BY step DESC LIMIT 1").fetchone()
        return json.loads(row[0]) if row else {}

    def close(self) -> None:
        self._wal.close()
        self._db.close()
        self._mark.close()
