"""The file `tinker.sqlite` of a run: every record of a server, as it was last kept. It survives a kill."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_origin

import msgspec
import numpy as np

from proto import codec
from proto.errors import WireError
from proto.messages import ErrorCode
from services.policy_trainer.tinker.records import KINDS, Record, kind_of
from shared.rpc.errors import RpcError

FILE = "tinker.sqlite"
FORMAT = 2


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return codec.to_map(value)
    raise TypeError(f"a record cannot hold a {type(value).__name__}")


def _decoded(kind: Any, value: Any) -> Any:
    if np.ndarray in (kind, get_origin(kind)):
        return codec.from_map(value)
    raise TypeError(f"a record cannot hold a {kind}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)


class ServerJournal:
    """The journal of one run, open until `close`."""

    def __init__(self, file: Path) -> None:
        """Open or create the journal. Raises RpcError(conflict) if it cannot be used."""
        self._file = file
        try:
            self._db = sqlite3.connect(file, isolation_level=None)
            # A kill of the process loses nothing with this setting; the death of the machine may lose the last rows.
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, FORMAT):
                raise RpcError(ErrorCode.CONFLICT, f"{file}: format {found}, but this release reads {FORMAT}")
            self._db.execute(f"PRAGMA user_version={FORMAT}")
            columns = "kind TEXT, id TEXT, record BLOB, PRIMARY KEY (kind, id)"
            self._db.execute(f"CREATE TABLE IF NOT EXISTS records ({columns}) WITHOUT ROWID")
        except sqlite3.Error as error:
            raise self._unusable(error) from error

    def records(self) -> Iterator[Record]:
        """Yield all records. Raises RpcError(conflict) for one that cannot be read."""
        try:
            for kind, blob in self._db.execute("SELECT kind, record FROM records"):
                yield msgspec.msgpack.decode(blob, type=KINDS[kind], dec_hook=_decoded)
        except (sqlite3.Error, msgspec.MsgspecError, WireError, KeyError) as error:
            raise self._unusable(error) from error

    def write(self, kept: Iterable[Record], dropped: Iterable[tuple[str, str]]) -> None:
        """Keep and drop records in one transaction. Raises RpcError(internal), after which nothing may be answered."""
        rows = [(kind_of(record), record.id, _ENCODER.encode(record)) for record in kept]
        try:
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", rows)
            self._db.executemany("DELETE FROM records WHERE kind = ? AND id = ?", dropped)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            raise RpcError(ErrorCode.INTERNAL, f"{self._file}: {error}") from error

    def close(self) -> None:
        self._db.close()

    def _unusable(self, error: Exception) -> RpcError:
        remedy = "put back a copy of it, or remove it, which forgets all clients"
        return RpcError(ErrorCode.CONFLICT, f"{self._file}: cannot be read ({error}); {remedy}")
