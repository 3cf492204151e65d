"""The tables of the journal, and the checksums over events, snapshots and rows.

The column `metrics` of the table `steps` is `{}`, because `rows` has the values. Earlier releases filled it.

An event's checksum covers the event and all earlier events; these checksums are the chain. The parts of a snapshot form
a chain that continues from the snapshot's event. Each row of the other tables ends with its own checksum.
"""

from __future__ import annotations

import contextlib
import sqlite3
import struct

import msgspec
import xxhash

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
