"""The table in docs/your_code.md says what the values of a Parquet file are when user code gets them."""

from __future__ import annotations

import datetime
import decimal
import re
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from services.rollout.user_code.frames import BeginSample
from shared.data.open import open_source

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "your_code.md").read_text()
DAY = datetime.datetime(2024, 1, 2, 3, 4, 5)
STATED = {
    "decimal128": pyarrow.array([decimal.Decimal("1.50")]),
    "date32": pyarrow.array([DAY.date()], pyarrow.date32()),
    "date64": pyarrow.array([DAY.date()], pyarrow.date64()),
    "timestamp": pyarrow.array([DAY], pyarrow.timestamp("ns")),
    "time32": pyarrow.array([DAY.time()], pyarrow.time32("ms")),
    "time64": pyarrow.array([DAY.time()], pyarrow.time64("us")),
    "duration": pyarrow.array([datetime.timedelta(seconds=61)]),
    "map": pyarrow.array([[("k", 1), ("j", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "float32": pyarrow.array([0.1], pyarrow.float32()),
}
KEPT = ["text", 3, 0.1, True, b"\x00\xff", [1, None], {"a": 1}, DAY.replace(tzinfo=datetime.UTC)]


def row_in_user_code(folder: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Write a Parquet file with one row, and return the row that a process with user code receives."""
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], **columns}), file)
    row = open_source(f"parquet:{file}", where="test").row(0)
    sent = msgspec.msgpack.encode(BeginSample(0, "train/0/0", 0, row, ""))
    return msgspec.msgpack.decode(sent, type=BeginSample).row


def test_the_table_states_what_each_type_becomes(tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`\w+`.*?) \| .+? \| `(.+?)` \|$", PAGE.split("| in the file |")[1].split("\n\n")[0], re.M)
    stated = {name: value for names, value in rows for name in re.findall("`([^`]+)`", names)}
    found = row_in_user_code(tmp_path, STATED)
    assert {name: msgspec.json.decode(value) for name, value in stated.items()} == {
        name: found[name] for name in STATED
    }


def test_other_types_stay_what_they_are(tmp_path: Path) -> None:
    found = row_in_user_code(tmp_path, {f"c{number}": pyarrow.array([value]) for number, value in enumerate(KEPT)})
    assert [found[f"c{number}"] for number in range(len(KEPT))] == KEPT


def test_a_null_field_is_absent(tmp_path: Path) -> None:
    columns = {"answer": pyarrow.array([None], pyarrow.string()), "more": pyarrow.array([{"a": 1, "b": None}])}
    found = row_in_user_code(tmp_path, columns)
    assert found == {"prompt": "1+1=", "more": {"a": 1}}


def test_nanoseconds_that_are_no_whole_microseconds_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Nanosecond"):
        row_in_user_code(tmp_path, {"at": pyarrow.array([1_700_000_000_000_000_001], pyarrow.timestamp("ns"))})
