"""warnings.jsonl holds only complete lines, and docs/reading.md has one row for each kind and names only keys that
topologies have.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from services.monitor.warnings.desk import WarningFile
from shared.runfiles import warnings
from shared.runfiles.warnings import WarningRecord
from shared.topology.monitor import WarningKind
from tests.golden.topology_keys import DOCUMENT as KEYS

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


DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "reading.md"
SECTIONS = ("algorithm", "checkpoint", "data", "gc", "optimizer", "policy", "reward", "run", "sampling", "services")


def rows() -> list[list[str]]:
    """Return the cells of the table of kinds."""
    table = DOCUMENT.read_text().split("| kind |")[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_a_complete_row_for_every_kind_of_warning() -> None:
    assert sorted(row[0].strip("`") for row in rows()) == sorted(WarningKind)
    assert all(len(row) == 4 and all(row) for row in rows())


def test_remedies_name_keys_that_exist() -> None:
    known = set(re.findall(r"^\| `([^`]+)` \|", KEYS.read_text(), re.M))
    detectors = DOCUMENT.parents[1] / "services" / "monitor" / "warnings"
    sources = [DOCUMENT, detectors / "learning.py", detectors / "pipeline.py"]
    lines = [line for source in sources for line in source.read_text().splitlines()]
    text = "\n".join(line for line in lines if not line.startswith(("from ", "import ")))
    named = set(re.findall(rf"\b(?:{'|'.join(SECTIONS)})(?:\.[a-z_-]+)+(?![\w/(])", text))
    assert {key for key in named if not any(each == key or each.startswith(f"{key}.") for each in known)} == set()
    assert len(named) > 20
