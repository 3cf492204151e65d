"""Digests of rows: what a resumed run notices about its data, and in which row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.data import Source, SourceChanged, open_source
from shared.data import source as c
from shared.data.source import RowCheck, RowDigests, read_rows

ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(10)]
BAD = {"answer": "1"}


def jsonl(path: Path, rows: list[dict[str, str]], end: str = "\n") -> Source:
    path.write_text("\n".join(map(json.dumps, rows)) + end)
    return open_source(f"jsonl:{path}", where="t.yaml:3")


def parquet(path: Path, rows: list[dict[str, str]]) -> Source:
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    return open_source(f"parquet:{path}", where="t.yaml:3")


def digests(source: Source, like: RowDigests | None = None, most: int | None = None) -> RowDigests:
    return read_rows(source, most, like)[1]


@pytest.fixture(params=[1, 4], ids=["a digest per row", "a digest per four rows"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    size: int = request.param
    monkeypatch.setattr(c, "MOST_DIGESTS", len(ROWS) // size + (size > 1))
    return size


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_the_first_row_that_differs_is_named(tmp_path: Path, block: int, write: object) -> None:
    assert callable(write)
    begun = digests(write(tmp_path / "begun", ROWS))
    assert begun.block == block

    def difference(rows: list[dict[str, str]]) -> str:
        return begun.difference(digests(write(tmp_path / "now", rows), begun))

    assert difference(ROWS) == ""
    assert difference([*ROWS, ROWS[0]]) == ""
    assert difference(ROWS[:8]) == "only 8 of 10 are left"
    assert difference(ROWS[::-1]) == ("row 0 changed" if block == 1 else "one of the rows 0 to 3 changed")
    inserted = [*ROWS[:5], ROWS[0], *ROWS[5:]]
    assert difference(inserted) == ("row 5 changed" if block == 1 else "one of the rows 4 to 7 changed")
    last = [*ROWS[:9], ROWS[0]]
    assert difference(last) == ("row 9 changed" if block == 1 else "one of the rows 8 to 9 changed")
    assert difference([BAD, *ROWS[1:]]) != ""  # rows that cannot be used have indices, too


def test_space_around_a_row_and_a_missing_last_line_break_are_no_difference(tmp_path: Path) -> None:
    begun = digests(jsonl(tmp_path / "begun", ROWS, end=""))
    assert begun.difference(digests(jsonl(tmp_path / "now", [*ROWS, ROWS[0]], end="  \n\n"), begun)) == ""


def test_only_the_rows_that_an_evaluation_uses_count(tmp_path: Path) -> None:
    begun = digests(jsonl(tmp_path / "begun", ROWS), most=3)
    now = digests(jsonl(tmp_path / "now", [*ROWS[:3], ROWS[9]]), begun, most=3)
    assert (begun.rows, now.rows, begun.difference(now)) == (3, 3, "")


def test_rows_of_several_files_are_counted_across_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "part-0", ROWS[:5])
    jsonl(tmp_path / "part-1", ROWS[5:])
    begun = digests(open_source(f"jsonl:{tmp_path}/part-*", where="t.yaml:3"))
    jsonl(tmp_path / "part-1", [*ROWS[5:8], ROWS[0], ROWS[9]])
    assert (
        begun.difference(digests(open_source(f"jsonl:{tmp_path}/part-*", where="t.yaml:3"), begun)) == "row 8 changed"
    )


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_row_that_changed_is_refused_when_it_is_used(tmp_path: Path, block: int, write: object) -> None:
    assert callable(write)
    begun = digests(write(tmp_path / "begun", ROWS))
    check = RowCheck(write(tmp_path / "now", [*ROWS[:8], ROWS[0], ROWS[9], BAD]), begun)
    for index in (0, 7, 0, 10):
        check.check(index)
    with pytest.raises(SourceChanged, match="8" if block == 1 else "one of the rows 8 to 9 changed"):
        check.check(8)


def test_a_builtin_has_the_same_content_in_every_process() -> None:
    first, second = (open_source("builtin:addition?split=test", where="t.yaml:3") for _ in range(2))
    assert digests(first).rows == 256
    assert digests(first) == digests(second)
