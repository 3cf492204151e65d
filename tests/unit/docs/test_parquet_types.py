"""The table in docs/your_code.md says what the values of a Parquet file are when user code gets them."""

from __future__ import annotations

import datetime
import decimal
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from services.rollout.user_code.frames import BeginSample
from shared.data import DataError, open_source

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "your_code.md").read_text()
DAY = datetime.datetime(2024, 1, 2, 3, 4, 5)
SECOND = 1_000_000_000
LATER = 1_704_164_645 * SECOND + 1
"""One nanosecond after DAY."""
STATED = {
    "decimal128": pyarrow.array([decimal.Decimal("1.50")]),
    "decimal256": pyarrow.array([decimal.Decimal("1.50")], pyarrow.decimal256(50, 2)),
    "date32": pyarrow.array([DAY.date()], pyarrow.date32()),
    "date64": pyarrow.array([DAY.date()], pyarrow.date64()),
    "timestamp": pyarrow.array([DAY], pyarrow.timestamp("us")),
    "timestamp[ns]": pyarrow.array([LATER], pyarrow.timestamp("ns")),
    "timestamp[ns, tz]": pyarrow.array([LATER], pyarrow.timestamp("ns", "Asia/Tokyo")),
    "time32": pyarrow.array([DAY.time()], pyarrow.time32("ms")),
    "time64": pyarrow.array([DAY.time()], pyarrow.time64("us")),
    "time64[ns]": pyarrow.array([LATER % (86400 * SECOND)], pyarrow.time64("ns")),
    "duration": pyarrow.array([datetime.timedelta(seconds=61)]),
    "duration[ns]": pyarrow.array([61 * SECOND + 1], pyarrow.duration("ns")),
    "month_day_nano_interval": pyarrow.array([(1, 2, 3)], pyarrow.month_day_nano_interval()),
    "map": pyarrow.array([[("k", 1), ("j", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "float32": pyarrow.array([0.1], pyarrow.float32()),
}
ONLY_SAVED = {"month_day_nano_interval"}
"""Types that Parquet does not have."""
KEPT = ["text", 3, 0.1, True, b"\x00\xff", [1, None], {"a": 1}, DAY.replace(tzinfo=datetime.UTC)]
KEPT_TYPES = {
    "large": (["ä" * 3], pyarrow.large_string()),
    "view": (["ä" * 30], pyarrow.string_view()),
    "binary": ([b"\xff"], pyarrow.large_binary()),
    "fixed": ([b"abc"], pyarrow.binary(3)),
    "codes": (["x"], pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    "numbers": ([7], pyarrow.dictionary(pyarrow.int32(), pyarrow.int64())),
    "nested": ([[[1], [], None, [2, None]]], pyarrow.list_(pyarrow.large_list(pyarrow.int16()))),
    "sized": ([[1, 2]], pyarrow.list_(pyarrow.int32(), 2)),
    "largest": ([2**64 - 1], pyarrow.uint64()),
    "half": ([0.5], pyarrow.float16()),
    "messages": (
        [[{"role": "user", "calls": [{"name": "f", "at": LATER - 1}]}, {"role": "tool", "calls": None}]],
        pyarrow.list_(
            pyarrow.struct(
                {
                    "role": pyarrow.string(),
                    "calls": pyarrow.list_(pyarrow.struct({"name": pyarrow.string(), "at": pyarrow.int64()})),
                }
            )
        ),
    ),
}


def saved(folder: Path, table: Any) -> str:
    """Write a data set as `Dataset.save_to_disk` does (see tests/unit/shared/saved_dataset)."""
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as stream:
        stream.write_table(table)
    return f"datasets:{folder}"


def parquet(folder: Path, table: Any) -> str:
    file = folder / "rows.parquet"
    pyarrow.parquet.write_table(table, file)
    return f"parquet:{file}"


def row_in_user_code(folder: Path, columns: dict[str, Any], write: Callable[[Path, Any], str] = parquet) -> Any:
    """Write a file with one row, and return the row that a process with user code receives."""
    source = open_source(write(folder, pyarrow.table({"prompt": ["1+1="], **columns})), where="test")
    assert source.validate() == []
    assert source.content(0)
    sent = msgspec.msgpack.encode(BeginSample(0, "train/0/0", 0, source.row(0), ""))
    return msgspec.msgpack.decode(sent, type=BeginSample).row


@pytest.mark.parametrize("write", [parquet, saved])
def test_the_table_states_what_each_type_becomes(tmp_path: Path, write: Callable[[Path, Any], str]) -> None:
    rows = re.findall(
        r"^\| (`[^|]+`.*?) \| .+? \| `(.+?)` \|$", PAGE.split("| in the file |")[1].split("\n\n")[0], re.M
    )
    stated = {name: value for names, value in rows for name in re.findall("`([^`]+)`", names)}
    assert stated.keys() == STATED.keys()
    columns = {name: column for name, column in STATED.items() if write is saved or name not in ONLY_SAVED}
    found = row_in_user_code(tmp_path, columns, write)
    assert {name: msgspec.json.decode(stated[name]) for name in columns} == {name: found[name] for name in columns}


def test_other_types_stay_what_they_are(tmp_path: Path) -> None:
    found = row_in_user_code(tmp_path, {f"c{number}": pyarrow.array([value]) for number, value in enumerate(KEPT)})
    assert [found[f"c{number}"] for number in range(len(KEPT))] == KEPT


@pytest.mark.parametrize("write", [parquet, saved])
def test_all_widths_and_nestings_of_a_type_become_the_same_values(
    tmp_path: Path, write: Callable[[Path, Any], str]
) -> None:
    found = row_in_user_code(tmp_path, {name: pyarrow.array(*given) for name, given in KEPT_TYPES.items()}, write)
    messages = found.pop("messages")
    assert messages == [{"role": "user", "calls": [{"name": "f", "at": LATER - 1}]}, {"role": "tool"}]
    assert found == {
        "prompt": "1+1=",
        **{name: given[0][0] for name, given in KEPT_TYPES.items() if name != "messages"},
    }


def test_nanoseconds_within_lists_maps_and_structs_are_text(tmp_path: Path) -> None:
    kind = pyarrow.timestamp("ns")
    columns = {
        "times": pyarrow.array([[LATER, None, LATER - 1]], pyarrow.list_(kind)),
        "named": pyarrow.array([[("a", {"at": LATER})]], pyarrow.map_(pyarrow.string(), pyarrow.struct({"at": kind}))),
    }
    assert row_in_user_code(tmp_path, columns) == {
        "prompt": "1+1=",
        "times": ["2024-01-02T03:04:05.000000001", None, "2024-01-02T03:04:05"],
        "named": [["a", {"at": "2024-01-02T03:04:05.000000001"}]],
    }


def test_nanoseconds_before_1970_and_negative_durations_are_exact(tmp_path: Path) -> None:
    columns = {
        "at": pyarrow.array([-1], pyarrow.timestamp("ns")),
        "micro": pyarrow.array([-1000], pyarrow.timestamp("ns")),
        "took": pyarrow.array([-1], pyarrow.duration("ns")),
    }
    found = row_in_user_code(tmp_path, columns)
    assert (found["at"], found["micro"]) == ("1969-12-31T23:59:59.999999999", "1969-12-31T23:59:59.999999")
    assert found["took"] == "-PT0.000000001S"


@pytest.mark.parametrize(
    "bad",
    [
        pyarrow.array([0, 2**62, 0], pyarrow.timestamp("s")),
        pyarrow.Array.from_buffers(
            pyarrow.string(),
            3,
            [None, pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xffb")],
        ),
    ],
    ids=["year", "text"],
)
def test_a_value_that_python_cannot_represent_makes_only_its_row_unusable(tmp_path: Path, bad: Any) -> None:
    source = open_source(saved(tmp_path, pyarrow.table({"prompt": ["a", "b", "c"], "bad": bad})), where="t")
    (error,) = source.validate()
    assert error.index == 1
    assert error.message.startswith(f"{tmp_path} row 1: cannot be read: ")
    assert source.row(2)["prompt"] == "c"
    with pytest.raises(DataError, match="row 1: cannot be read"):
        source.row(1)
    assert source.content(1) != source.content(0)


def test_a_null_field_is_absent(tmp_path: Path) -> None:
    columns = {"answer": pyarrow.array([None], pyarrow.string()), "more": pyarrow.array([{"a": 1, "b": None}])}
    found = row_in_user_code(tmp_path, columns)
    assert found == {"prompt": "1+1=", "more": {"a": 1}}
