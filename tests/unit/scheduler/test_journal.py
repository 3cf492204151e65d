"""While a snapshot is written in parts, a kill at any moment leaves a state that can be recovered completely."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest

from services.scheduler import journal as journal_module
from services.scheduler import tables
from services.scheduler.events import Cleared, Rewound
from services.scheduler.journal import Journal


def killed_now(path: Path, folder: Path) -> Journal:
    """Return the journal as the next process finds it after a kill at this instant."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        shutil.copy(file, folder / file.name)
    return Journal(folder / path.name, "plan")


def test_a_kill_between_any_two_parts_of_a_snapshot_leaves_a_complete_old_or_new_state(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.sqlite"
    path.parent.mkdir()
    journal = Journal(path, "plan")
    events = [Cleared("batch-store/0", number) for number in range(200)]
    for event in events[:20]:
        journal.append(event, 0.0)
    journal.begin_snapshot(iter([b"first"] * 5))
    while journal.write_part():
        pass
    assert list(journal.snapshot()) == [b"first"] * 5
    assert list(journal.events()) == []
    for event in events[20:40]:
        journal.append(event, 0.0)
    journal.begin_snapshot(iter([b"second"] * 5))
    assert not journal.due
    more, number = True, 0
    seen: set[bytes] = set()
    while more:
        journal.append(events[40 + number], 0.0)  # Events keep arriving between the parts.
        journal.commit()
        more = journal.write_part()
        number += 1
        found = killed_now(path, tmp_path / f"kill-{number}")
        packed = list(found.snapshot())
        assert packed in ([b"first"] * 5, [b"second"] * 5)
        seen.add(packed[0])
        first = 20 if packed[0] == b"first" else 40
        assert list(found.events()) == events[first : 40 + number]
        found.close()
    assert len(seen) == 2
    assert not journal.write_part()
    journal.close()
    again = Journal(path, "plan")
    assert list(again.snapshot()) == [b"second"] * 5
    assert list(again.events()) == events[40 : 40 + number]
    again.append(Cleared("batch-store/0", 99), 0.0)
    again.commit()
    assert list(again.events())[-1] == Cleared("batch-store/0", 99)
    again.close()


def test_a_part_is_bounded_and_old_events_are_also_deleted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "PART_EVENTS", 7)
    journal = Journal(tmp_path / "journal.sqlite", "plan")
    for number in range(30):
        journal.append(Cleared("batch-store/0", number), 0.0)
    journal.begin_snapshot(iter([b"x"]))
    rounds = 1
    while journal.write_part():
        rounds += 1
    assert rounds >= 1 + 1 + 30 // 7
    journal.close()


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
        db.create_function("checksum", -1, tables.checksum)
        db.execute(
            "CREATE TABLE evals (\n    name TEXT NOT NULL, version INTEGER NOT NULL, accuracy REAL, "
            "samples INTEGER NOT NULL,\n    dropped INTEGER NOT NULL, at REAL NOT NULL, sum BLOB NOT NULL, "
            "PRIMARY KEY (name, version))"
        )
        db.execute(tables.SAVE_META, ("format", "rlbus-scheduler-14"))
    again = Journal(path, "plan")
    assert list(again.events()) == [Cleared("batch-store/0", 1)]
    again.close()
    Journal(path, "plan").close()
