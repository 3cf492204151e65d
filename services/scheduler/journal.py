"""The scheduler's journal on disk: every durable event in order, periodic snapshots, and readable tables for people.

The file is an SQLite database in WAL mode, committed once per burst. Effects are carried out only after their event is
in it. A snapshot is written in parts, between which new events are accepted. It takes effect when its row is in the
table `snapshot`; the events before it are then deleted, also in parts. The journal does not interpret events. A killed
process loses nothing. Because of `synchronous=NORMAL`, a power cut may lose the last commits, but never their order.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from proto import codec
from proto.errors import WireError
from proto.messages import ErrorCode
from proto.registry import Message
from services.scheduler.events import (
    Cleared,
    Configure,
    DiscardRows,
    Durable,
    Internal,
    Leased,
    LeaseExpired,
    Rewound,
    SaveEval,
    SaveStep,
    StoreGone,
    WriteRow,
)
from services.scheduler.snapshot import LAYOUT
from services.scheduler.tasks import TaskState
from services.scheduler.wal import WalCheckpoints
from shared.rpc.errors import RpcError

FORMAT = f"rlbus-scheduler-{LAYOUT}"
SNAPSHOT_BYTES = 8 << 20
"""Bytes of events, or twice the bytes of the last snapshot if that is more, after which a new snapshot is written.

Replay is therefore bounded, and snapshots cost a constant share of all writing.
"""
PART_BYTES = 1 << 20
"""Maximum bytes of old events that one transaction deletes, which bounds the delay of requests."""
PART_EVENTS = 1024
"""Maximum number of old events that one transaction deletes."""

_INTERNAL: tuple[type[Internal], ...] = (Configure, Leased, LeaseExpired, Cleared, StoreGone)
_DECODERS = {-1 - i: msgspec.msgpack.Decoder(kind) for i, kind in enumerate(_INTERNAL)}
_COMPLETE = object()
_KINDS = {kind: -1 - i for i, kind in enumerate(_INTERNAL)}
_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS parts (
    seq INTEGER NOT NULL, part INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (seq, part));
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY, state TEXT NOT NULL, task_ids TEXT NOT NULL, committed_at REAL, metrics TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS evals (
    name TEXT NOT NULL, version INTEGER NOT NULL, accuracy REAL NOT NULL, samples INTEGER NOT NULL,
    dropped INTEGER NOT NULL, at REAL NOT NULL, PRIMARY KEY (name, version));
CREATE TABLE IF NOT EXISTS rows (step INTEGER PRIMARY KEY, row TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rewinds (
    lineage INTEGER PRIMARY KEY, step INTEGER NOT NULL, committed INTEGER NOT NULL, at REAL NOT NULL);
"""


def rewinds(path: Path) -> list[tuple[int, int]]:
    """Return `(step, committed)` of each rewind of a run, oldest first, or [] if its journal cannot be read."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as journal:
            return journal.execute("SELECT step, committed FROM rewinds ORDER BY lineage").fetchall()
    except sqlite3.Error:
        return []


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Recorded]:
    """Open the journal of a run, which may be live, as it is now, and change nothing.

    Raises RpcError(bad_request), one line, if there is none or it cannot be read.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as db:
            db.execute("BEGIN")  # everything is read as of the first query
            yield Recorded(db)
    except (sqlite3.Error, WireError, msgspec.MsgspecError) as error:
        raise RpcError(ErrorCode.BAD_REQUEST, f"journal {path}: cannot be read ({error})") from None


class Recorded:
    """What a journal holds, for readers other than its scheduler. Its methods raise what `reading` translates."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        row = db.execute("SELECT seq FROM snapshot").fetchone()
        self._seq: int = row[0] if row else 0

    def snapshot(self) -> list[bytes]:
        """Return the parts of the newest snapshot, or [] if there is none."""
        query = "SELECT body FROM parts WHERE seq = ? ORDER BY part"
        return [body for (body,) in self._db.execute(query, (self._seq,))] if self._seq else []

    def events(self) -> Iterator[tuple[float, Durable]]:
        """Yield the events after the snapshot in order, each with its time in seconds since 1970."""
        for at, kind, body in self._db.execute(
            "SELECT at, kind, body FROM events WHERE seq > ? ORDER BY seq", (self._seq,)
        ):
            yield at, _decode(kind, body)

    def steps_of(self, task_id: str) -> list[tuple[int, str, float | None]]:
        """Return `(step, state, committed_at)` of the steps whose batches held a task."""
        query = "SELECT step, state, committed_at FROM steps WHERE instr(task_ids, ?) ORDER BY step"
        return self._db.execute(query, (json.dumps(task_id),)).fetchall()


def _decode(kind: int, body: bytes) -> Durable:
    decoder = _DECODERS.get(kind)
    return decoder.decode(body) if decoder is not None else cast(Durable, codec.decode_body(kind, body))


class Journal:
    """An open journal. `append` and `save` add to the transaction of the next `commit`."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        """Open or create the journal of the run with this plan fingerprint.

        Raises RpcError(bad_request), one line, if the file is not a journal, is damaged, or was written by another
        release or under another plan.
        """
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA wal_autocheckpoint=0")  # these sync on this thread: see wal.py
            page_bytes = self._db.execute("PRAGMA page_size").fetchone()[0]
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            self._db.execute("BEGIN IMMEDIATE")
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables and "meta" not in tables:
                raise sqlite3.DatabaseError(f"not a scheduler's journal (tables {', '.join(sorted(tables))})")
            for statement in _TABLES.split(";"):
                self._db.execute(statement)
            meta = dict(self._db.execute("SELECT key, value FROM meta"))
            if not meta:
                rows = [("format", FORMAT), ("plan", fingerprint)]
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", rows)
                meta = dict(rows)
            self._db.execute("COMMIT")
            self.seq = self._db.execute("SELECT max(seq) FROM events").fetchone()[0] or self._snapshot_seq()
            kept = self._snapshot_seq()
            self._event_bytes = self._total("SELECT total(length(body)) FROM events WHERE seq > ?", kept)
            self._snapshot_bytes = self._total("SELECT total(length(body)) FROM parts WHERE seq = ?", kept)
            self._db.execute("DELETE FROM parts WHERE seq <> ?", (kept,))  # parts of an unfinished snapshot
        except sqlite3.Error as error:
            raise self._broken(str(error)) from None
        if meta.get("format") != FORMAT:
            raise self._broken(f"format {meta.get('format')!r}, this release reads {FORMAT!r}; use the same release")
        if meta.get("plan") != fingerprint:
            raise self._broken(
                "written with another seed, data, staleness, stages or batch sizes, which cannot change within a run; "
                "start a new run"
            )
        self._events: list[tuple[int, float, int, bytes]] = []
        self._saves: list[tuple[str, tuple[Any, ...]]] = []
        self._writing: Iterator[None] | None = None
        self._pending_bytes = 0
        """Bytes of the transaction that is being assembled."""
        self._wal = WalCheckpoints(path, page_bytes)

    def _total(self, query: str, seq: int) -> int:
        return int(self._db.execute(query, (seq,)).fetchone()[0])

    def _snapshot_seq(self) -> int:
        row = self._db.execute("SELECT seq FROM snapshot").fetchone()
        return row[0] if row else 0

    def _broken(self, cause: str) -> RpcError:
        return RpcError(ErrorCode.BAD_REQUEST, f"journal {self._path}: {cause}"[:500])

    @property
    def has_snapshot(self) -> bool:
        return self._snapshot_seq() > 0

    def snapshot(self) -> Iterator[bytes]:
        """Yield the parts of the newest snapshot. Raises RpcError if they cannot be read."""
        try:
            query = "SELECT body FROM parts WHERE seq = ? ORDER BY part"
            for (body,) in self._db.execute(query, (self._snapshot_seq(),)):
                yield body
        except sqlite3.Error as error:
            raise self._broken(f"snapshot: {error}; restore the file from a backup") from None

    def events(self) -> Iterator[Durable]:
        """Yield every event after the snapshot, in order. Raises RpcError if one is missing or cannot be read."""
        seq = self._snapshot_seq()
        try:
            query = "SELECT seq, kind, body FROM events WHERE seq > ? ORDER BY seq"
            for found, kind, body in self._db.execute(query, (seq,)):
                if found != seq + 1:
                    raise self._broken(f"event {seq + 1} is missing; restore the file from a backup")
                seq = found
                yield _decode(kind, body)
        except (sqlite3.Error, WireError, msgspec.MsgspecError) as error:
            raise self._broken(f"event {seq}: {error}; restore the file from a backup") from None

    def append(self, event: Durable, at: float) -> None:
        """Add a durable event. `at` is in seconds since 1970 and only for human readers."""
        kind = _KINDS.get(type(event))  # type: ignore[arg-type]
        if kind is not None:
            body = msgspec.msgpack.encode(event)
        else:
            message = cast(Message, event)
            kind, body = message.TYPE, codec.encode_body(message)
        self.seq += 1
        self._event_bytes += len(body)
        self._pending_bytes += len(body)
        self._events.append((self.seq, at, kind, body))

    def save(self, effect: SaveStep | SaveEval | WriteRow | Rewound | DiscardRows, at: float) -> None:
        """Add a row to a readable table, or remove rows of steps that were taken back."""
        match effect:
            case SaveStep(state=TaskState.BATCHED):
                values: tuple[Any, ...] = (effect.step, effect.state, json.dumps(effect.task_ids), None, "{}")
                self._saves.append(("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)", values))
            case SaveStep():
                values = (effect.state, at, json.dumps(effect.metrics), effect.step)
                self._saves.append(("UPDATE steps SET state=?, committed_at=?, metrics=? WHERE step=?", values))
            case SaveEval():
                values = (effect.name, effect.version, effect.accuracy, effect.samples, effect.dropped, at)
                self._saves.append(("INSERT OR REPLACE INTO evals VALUES (?, ?, ?, ?, ?, ?)", values))
            case WriteRow():
                self._saves.append(("INSERT OR IGNORE INTO rows VALUES (?, ?)", (effect.step, json.dumps(effect.row))))
            case Rewound():
                values = (effect.lineage, effect.step, effect.committed, at)
                self._saves.append(("INSERT OR REPLACE INTO rewinds VALUES (?, ?, ?, ?)", values))
                self._saves.append(("UPDATE steps SET state='TAKEN_BACK' WHERE step > ?", (effect.step,)))
            case DiscardRows():
                self._saves.append(("DELETE FROM rows WHERE step > ?", (effect.step,)))
                self._saves.append(("DELETE FROM evals WHERE version > ?", (effect.step,)))

    @property
    def dirty(self) -> bool:
        return bool(self._events or self._saves)

    @property
    def due(self) -> bool:
        """Whether enough events were written since the last snapshot for a new one."""
        return self._writing is None and self._event_bytes > max(SNAPSHOT_BYTES, 2 * self._snapshot_bytes)

    def commit(self) -> None:
        """Make everything since the last commit durable. Raises RpcError naming the file if it cannot be written."""
        if not self.dirty:
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?)", self._events)
            for statement, values in self._saves:
                self._db.execute(statement, values)
            self._end()
        except sqlite3.Error as error:
            raise self._unwritable(str(error)) from None
        self._events.clear()
        self._saves.clear()

    def _end(self) -> None:
        """Commit a transaction and report its size to the WAL checkpoints."""
        self._db.execute("COMMIT")
        nbytes, self._pending_bytes = self._pending_bytes, 0
        self._wal.wrote(nbytes, self._db)
        if self._wal.error:
            raise sqlite3.OperationalError(self._wal.error)

    def _unwritable(self, cause: str) -> RpcError:
        return self._broken(
            f"cannot be written: {cause}; nothing that was not written has left this process: make room or repair "
            "the disk, then resume the run"
        )

    def begin_snapshot(self, parts: Iterator[bytes]) -> None:
        """Begin a snapshot of the state after the last appended event. `write_part` writes it to disk."""
        self.commit()
        self._event_bytes = self._snapshot_bytes = 0
        self._writing = self._replace_events(self.seq, parts)

    def write_part(self) -> bool:
        """Write a bounded part of the snapshot in progress. Return False if there is none or it is complete."""
        if self._writing is None:
            return False
        try:
            self._db.execute("BEGIN IMMEDIATE")
            more = next(self._writing, _COMPLETE) is not _COMPLETE
            self._end()
        except sqlite3.Error as error:
            raise self._unwritable(str(error)) from None
        if not more:
            self._writing = None
        return more

    def _replace_events(self, seq: int, parts: Iterator[bytes]) -> Iterator[None]:
        """Write the snapshot, then delete what it replaces. Each iteration is one transaction.

        A kill between two iterations leaves either the old snapshot or the new one complete.
        """
        for part, body in enumerate(parts):
            self._db.execute("INSERT INTO parts VALUES (?, ?, ?)", (seq, part, body))
            self._snapshot_bytes += len(body)
            self._pending_bytes += len(body)
            yield
        self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?)", (seq,))
        yield
        for old, part in self._db.execute("SELECT seq, part FROM parts WHERE seq <> ?", (seq,)).fetchall():
            self._db.execute("DELETE FROM parts WHERE seq = ? AND part = ?", (old, part))
            yield
        while upto := self._last_deletable(seq):
            self._db.execute("DELETE FROM events WHERE seq <= ?", (upto,))
            yield

    def _last_deletable(self, seq: int) -> int:
        """Return the last event, up to `seq`, of those that the next transaction may delete, or 0 if there are none."""
        query = "SELECT seq, length(body) FROM events WHERE seq <= ? ORDER BY seq LIMIT ?"
        last = total = 0
        for found, nbytes in self._db.execute(query, (seq, PART_EVENTS)).fetchall():
            if last and total + nbytes > PART_BYTES:
                break
            last, total = found, total + nbytes
        return last

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
