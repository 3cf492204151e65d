"""While a snapshot is written in parts, a kill at any moment leaves a state that can be recovered completely."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from services.scheduler import journal_files
from services.scheduler.events import Cleared, Rewound
from services.scheduler.journal import Journal


def killed_now(path: Path, folder: Path) -> Journal:
    """Return the journal as the next process finds it after a kill at this instant."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, folder / file.name)
    return Journal(folder / path.name, "plan")


def test_a_snapshot_replaces_the_events_before_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.sqlite"
    path.parent.mkdir()
    journal = Journal(path, "plan")
    events = [Cleared("batch-store/0", number) for number in range(60)]
    for at, packed in ((0, [b"first"] * 5), (20, [b"second"] * 3)):
        for event in events[at : at + 20]:
            journal.append(event, 0.0)
        journal.write_snapshot(packed)
        killed = killed_now(path, tmp_path / f"kill-{at}")
        assert list(killed.snapshot()) == packed
        assert list(killed.events()) == []
        killed.close()
    for event in events[40:]:
        journal.append(event, 0.0)
    journal.commit()
    journal.close()
    again = Journal(path, "plan")
    assert list(again.snapshot()) == [b"second"] * 3
    assert list(again.events()) == events[40:]
    again.append(Cleared("batch-store/0", 99), 0.0)
    again.commit()
    assert list(again.events())[-1] == Cleared("batch-store/0", 99)
    again.close()


def test_a_kill_while_a_snapshot_is_written_leaves_the_previous_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", "plan")
    journal.append(Cleared("batch-store/0", 1), 0.0)
    journal.write_snapshot([b"first"])
    journal.append(Cleared("batch-store/0", 2), 0.0)
    journal.commit()
    journal._end = lambda: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        journal.write_snapshot([b"second"])
    killed = killed_now(tmp_path / "journal.sqlite", tmp_path / "killed")
    assert list(killed.snapshot()) == [b"first"]
    assert list(killed.events()) == [Cleared("batch-store/0", 2)]
    killed.close()


def test_the_checksum_of_a_row_survives_the_sign_of_zero(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", "plan")
    journal.save(Rewound(1, 0, 3), -0.0)
    journal.commit()
    journal.close()
    Journal(tmp_path / "journal.sqlite", "plan").close()


def test_a_journal_of_the_format_before_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path, "plan")
    journal.append(Cleared("batch-store/0", 1), 0.0)
    journal.commit()
    journal.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.create_function("checksum", -1, journal_files.checksum)
        db.execute(
            "CREATE TABLE evals (\n    name TEXT NOT NULL, version INTEGER NOT NULL, accuracy REAL, "
            "samples INTEGER NOT NULL,\n    dropped INTEGER NOT NULL, at REAL NOT NULL, sum BLOB NOT NULL, "
            "PRIMARY KEY (name, version))"
        )
        db.execute(journal_files.SAVE_META, ("format", "rlbus-scheduler-14"))
    again = Journal(path, "plan")
    assert list(again.events()) == [Cleared("batch-store/0", 1)]
    again.close()
    Journal(path, "plan").close()
