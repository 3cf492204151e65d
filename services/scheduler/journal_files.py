"""The files of a journal: its tables with their checksums, the mark beside them, and a reader for other processes.

The column `metrics` of the table `steps` is `{}`, because `rows` has the values. Earlier releases filled it.

An event's checksum covers the event and all earlier events; these checksums are the chain. The parts of a snapshot form
a chain that continues from the snapshot's event. Each row of the other tables ends with its own checksum.

SQLite replays a shortened write-ahead log without an error, as a shorter history. The mark, which records after each
commit what the journal then held, reveals such a loss. The mark is not synced. It survives if the process is killed. A
power cut can leave an older mark, but that mark names only events that the journal also contains. Two slots are written
alternately, so a torn write leaves the previous mark intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from proto.errors import WireError
from proto.messages import ErrorCode
from services.scheduler import earlier_journal
from services.scheduler.events import Durable, decode
from shared.rpc.errors import RpcError

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum BLOB NOT NULL);
CREATE TABLE events (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind INTEGER NOT NULL, body BLOB NOT NULL, chain BLOB NOT NULL);
CREATE TABLE snapshot (
    id INTEGER PRIMARY KEY CHECK (id = 1), seq INTEGER NOT NULL, chain BLOB NOT NULL, parts INTEGER NOT NULL,
    last BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE parts (
    seq INTEGER NOT NULL, part INTEGER NOT NULL, body BLOB NOT NULL, chain BLOB NOT NULL, PRIMARY KEY (seq, part));
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, state TEXT NOT NULL, task_ids TEXT NOT NULL, committed_at REAL, metrics TEXT NOT NULL,
    sum BLOB NOT NULL);
CREATE TABLE rows (step INTEGER PRIMARY KEY, row TEXT NOT NULL, sum BLOB NOT NULL);
CREATE TABLE rewinds (
    lineage INTEGER PRIMARY KEY, step INTEGER NOT NULL, committed INTEGER NOT NULL, at REAL NOT NULL,
    cause TEXT NOT NULL, sum BLOB NOT NULL);
"""
SAVE_STEP = "INSERT OR REPLACE INTO steps VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5))"
COMMIT_STEP = """
UPDATE steps SET state=?1, committed_at=?2, sum=checksum(step, ?1, task_ids, ?2, metrics) WHERE step=?3
"""
FORGOTTEN = "forgotten"
"""Key in the table `meta` of the last step whose rows in `steps` and `rows` have been deleted. If it is absent, none
have been."""
SAVE_META = "INSERT OR REPLACE INTO meta VALUES (?1, ?2, checksum(?1, ?2))"
TAKE_BACK = """
UPDATE steps SET state='TAKEN_BACK', sum=checksum(step, 'TAKEN_BACK', task_ids, committed_at, metrics) WHERE step > ?
"""
SAVE_ROW = "INSERT OR IGNORE INTO rows VALUES (?1, ?2, checksum(?1, ?2))"
SAVE_REWIND = "INSERT OR REPLACE INTO rewinds VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5))"
SAVE_SNAPSHOT = "INSERT OR REPLACE INTO snapshot VALUES (?1, ?2, ?3, ?4, ?5, checksum(?1, ?2, ?3, ?4, ?5))"
SUMMED = ("meta", "snapshot", "steps", "rows", "rewinds")
"""The tables whose rows end with `sum`, the checksum of their other columns."""
START = bytes(16)
"""The chain before the first event."""
_EVENT = struct.Struct("<qqd")
SLOT_BYTES = 512
"""Distance between the slots, which puts them in different sectors of the disk."""
_SLOTS = 2
_FIELDS = struct.Struct("<8sQq16sqqq")
_MAGIC = b"rlbusmrk"
_DIGEST_BYTES = 16


def link(chain: bytes, seq: int, kind: int, at: float, body: bytes) -> bytes:
    """Return the chain after an event, which is the checksum of the previous chain and the event."""
    return xxhash.xxh3_128_digest(b"".join((chain, _EVENT.pack(seq, kind, at), body)))


def checksum(*values: object) -> bytes:
    """Return the checksum of a row's columns. -0.0 counts as 0.0, because SQLite drops the sign of zero."""
    return xxhash.xxh3_128_digest(
        msgspec.msgpack.encode([value + 0.0 if isinstance(value, float) else value for value in values])
    )


def schema(db: sqlite3.Connection) -> list[tuple[str, ...]]:
    """Return the definitions of all tables in a database."""
    return db.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name").fetchall()


def expected_schema() -> list[tuple[str, ...]]:
    """Return the definitions of a journal's tables."""
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        create(db)
        return schema(db)


def create(db: sqlite3.Connection) -> None:
    """Create a journal's tables."""
    for statement in _TABLES.split(";"):
        db.execute(statement)


def forgotten(meta: dict[str, str]) -> int:
    """Return the last step whose batch and metrics row have been deleted, or -1, given the table `meta`."""
    return int(meta.get(FORGOTTEN, "-1"))


# ---- the mark


class Reached(NamedTuple):
    """The sequence number and chain of the last event, and the highest fence, lineage and committed step."""

    seq: int
    chain: bytes
    fence: int
    lineage: int
    step: int


class Mark:
    """An open mark file. `found` is the mark of the previous life, or None if it cannot be read."""

    def __init__(self, path: Path) -> None:
        """Open or create the mark file. Raises OSError."""
        self._folder = path.parent
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        data = os.pread(self._fd, _SLOTS * SLOT_BYTES, 0)
        self.missing = not data
        """Whether there was no mark, as in a new run or beside a copied journal."""
        slots = [_unpacked(data[at : at + SLOT_BYTES]) for at in range(0, _SLOTS * SLOT_BYTES, SLOT_BYTES)]
        self._number = 0
        self.found: Reached | None = None
        for slot in slots:
            if slot is not None and slot[0] > self._number:
                self._number, self.found = slot

    def write(self, reached: Reached) -> None:
        """Replace the older slot. Raises OSError."""
        self._number += 1
        fields = _FIELDS.pack(_MAGIC, self._number, *reached)
        slot = fields + xxhash.xxh3_128_digest(fields)
        if os.pwrite(self._fd, slot, self._number % _SLOTS * SLOT_BYTES) != len(slot):
            raise OSError("the mark was only partly written; is the disk full?")

    def create(self, reached: Reached) -> None:
        """Write the first mark and make the file durable, so that a power cut cannot remove it. Raises OSError."""
        self.write(reached)
        os.fsync(self._fd)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unpacked(slot: bytes) -> tuple[int, Reached] | None:
    """Return the number and content of a slot, or None if its checksum does not match."""
    fields, digest = slot[: _FIELDS.size], slot[_FIELDS.size : _FIELDS.size + _DIGEST_BYTES]
    if len(fields) < _FIELDS.size or xxhash.xxh3_128_digest(fields) != digest:
        return None
    magic, number, *reached = _FIELDS.unpack(fields)
    return (number, Reached(*reached)) if magic == _MAGIC else None


# ---- for processes other than the scheduler


def rewinds(path: Path) -> list[tuple[int, int, str]]:
    """Return `(step, committed, cause)` for each rewind of a run, oldest first, or [] for an unreadable journal."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as journal:
            return journal.execute("SELECT step, committed, cause FROM rewinds ORDER BY lineage").fetchall()
    except sqlite3.Error:
        return []


@contextlib.contextmanager
def reading(path: Path) -> Iterator[Recorded]:
    """Open the journal of a run read-only, in its current state. The run may be live.

    Raises RpcError(bad_request) with a one-line message if the journal is missing or cannot be read.
    """
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as db:
            db.execute("BEGIN")  # all queries see the state that the first one sees
            yield Recorded(db)
    except (sqlite3.Error, WireError, msgspec.MsgspecError) as error:
        raise RpcError(ErrorCode.BAD_REQUEST, f"journal {path}: cannot be read ({error})") from None


class Recorded:
    """The content of a journal, for readers other than its scheduler.

    `reading` translates the errors of its methods.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        row = db.execute("SELECT seq FROM snapshot").fetchone()
        self._seq: int = row[0] if row else 0
        meta = dict(db.execute("SELECT key, value FROM meta"))
        self._converted = meta.get("format") in (earlier_journal.WITH_EVALS, earlier_journal.BEFORE)
        self.forgotten = forgotten(meta)
        """The last step whose batch has been deleted, or -1."""

    def snapshot(self) -> list[bytes]:
        """Return the parts of the newest snapshot, or [] if there is none."""
        query = "SELECT body FROM parts WHERE seq = ? ORDER BY part"
        parts = [body for (body,) in self._db.execute(query, (self._seq,))] if self._seq else []
        return [earlier_journal.converted(parts[0]), *parts[1:]] if parts and self._converted else parts

    def events(self) -> Iterator[tuple[float, Durable]]:
        """Yield the events after the snapshot in order, each with its time in seconds since 1970."""
        for at, kind, body in self._db.execute(
            "SELECT at, kind, body FROM events WHERE seq > ? ORDER BY seq", (self._seq,)
        ):
            yield at, decode(kind, body)

    def steps_of(self, task_id: str) -> list[tuple[int, str, float | None]]:
        """Return `(step, state, committed_at)` for each step whose batch contains the task."""
        query = "SELECT step, state, committed_at FROM steps WHERE instr(task_ids, ?) ORDER BY step"
        return self._db.execute(query, (json.dumps(task_id),)).fetchall()
