"""warnings.jsonl holds only complete lines."""

from __future__ import annotations

import json
from pathlib import Path

from services.monitor.warnings.desk import WarningFile
from shared.runfiles import warnings
from shared.runfiles.warnings import WarningRecord

RECORD = WarningRecord(1.5, 12, "truncation", "seen", "do", "heldout")


def test_warnings_are_kept_and_an_incomplete_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "warnings.jsonl"
    file = WarningFile(path)
    file.append(RECORD)
    file.close()
    path.write_bytes(path.read_bytes() + b'{"at": 1')
    again = WarningFile(path)
    assert again.told == [RECORD]
    again.append(RECORD)
    again.close()
    assert warnings.read(path) == [RECORD, RECORD]
    assert set(json.loads(path.read_text().splitlines()[0])) == {"at", "step", "kind", "text", "remedy", "about"}


def test_a_warning_is_read_from_its_topic_and_invalid_values_are_ignored() -> None:
    values: dict[str, float | str] = {"at": 1.5, "step": 12.0, "kind": "k", "text": "t", "remedy": "r", "about": ""}
    assert warnings.of_topic(values) == WarningRecord(1.5, 12, "k", "t", "r")
    assert warnings.of_topic({"at": 1.5}) is None
    assert warnings.of_topic({**values, "step": "soon"}) is None


def test_a_warning_is_formatted_as_one_readable_line() -> None:
    assert warnings.line_of(RECORD) == "warning at step 12: seen; do (truncation)"
