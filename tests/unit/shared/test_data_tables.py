"""Tests rows from Parquet files, saved data sets and reasoning-gym."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.data import DataError, open_source
from shared.data.source import require

pytestmark = pytest.mark.slow

WHERE = "t.yaml:7: data.train.source"
SAVED = Path(__file__).parent / "saved_dataset"
"""Folder that datasets 5.2.0 itself wrote when the `make.py` in it was run."""


def parquet(path: Path, rows: list[dict[str, object]], rows_a_group: int = 2) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=rows_a_group)
    return f"parquet:{path}"


def test_parquet_rows_are_read_in_any_order_across_all_row_groups(tmp_path: Path) -> None:
    rows = [{"prompt": f"{at}+1=", "answer": at + 1, "tags": ["a", str(at)]} for at in range(7)]
    source = open_source(parquet(tmp_path / "rows.parquet", list(rows)), where=WHERE)
    assert len(source) == 7
    for index in (6, 0, 3, 1, 5, 2, 4, 6):
        assert source.row(index) == rows[index]
    assert source.validate() == []
    assert source.place(3) == f"{tmp_path / 'rows.parquet'} row 3"
    with pytest.raises(IndexError):
        source.row(7)


def test_fields_that_are_null_are_left_out_of_a_row(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"prompt": [{"role": "user", "content": "1"}], "answer": "1", "level": None},
        {"prompt": [{"role": "user", "content": "1"}, {"role": "tool", "content": "2", "name": "t"}], "level": 3},
    ]
    source = open_source(parquet(tmp_path / "rows.parquet", rows), where=WHERE)
    assert source.row(0) == {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}
    assert source.row(1) == rows[1]


def test_error_for_a_bad_row_names_its_place(tmp_path: Path) -> None:
    source = open_source(
        parquet(tmp_path / "rows.parquet", [{"prompt": "1"}, {"prompt": ""}, {"prompt": None}]), where=WHERE
    )
    assert [each.index for each in source.validate()] == [1, 2]
    with pytest.raises(DataError, match=r"rows\.parquet row 1: prompt is empty"):
        source.row(1)
    with pytest.raises(DataError, match=r"rows\.parquet row 2: row has no prompt"):
        source.row(2)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"PAR1 is not enough", "cannot be read"), (b"", "cannot be read")]
)
def test_a_file_that_is_not_parquet_causes_a_one_line_error(tmp_path: Path, content: bytes | None, says: str) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        open_source(f"parquet:{path}", where=WHERE)
    assert str(caught.value).startswith(f"{WHERE}: source ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_parquet_file_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="has no rows"):
        open_source(f"parquet:{tmp_path / 'e.parquet'}", where=WHERE)


def test_a_saved_data_set_is_read_without_the_library_that_wrote_it() -> None:
    pytest.importorskip("pyarrow")
    source = open_source(f"datasets:{SAVED / 'splits'}?split=train", where=WHERE)
    assert [source.row(index)["prompt"] for index in range(3)] == ["3+3=", "1+1=", "2+2="]
    assert source.row(0) == {"prompt": "3+3=", "answer": "6", "id": 3}
    assert source.place(1).endswith("splits/train row 1")
    chat = open_source(f"datasets:{SAVED / 'chat'}", where=WHERE)  # The data set is stored in two files.
    assert chat.row(0) == {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    assert chat.row(1)["prompt"][1] == {"role": "assistant", "content": "x", "name": "bob"}
    assert chat.validate() == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("splits", "has the splits train, test; add ?split=<one of them>"),
        ("splits?split=dev", "FileNotFoundError"),
        ("splits?part=train", "unknown parameter 'part'"),
        ("nowhere", "give a folder written by Dataset.save_to_disk"),
    ],
)
def test_a_folder_that_is_not_a_saved_data_set_causes_a_one_line_error(source: str, says: str) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError) as caught:
        open_source(f"datasets:{SAVED / source}", where=WHERE)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reasoning_gym_generates_the_same_rows_in_every_process() -> None:
    pytest.importorskip("reasoning_gym")
    names = ["chain_sum?size=5&seed=3", "simple_equations?size=5", "word_ladder?size=3", "ransom_note?size=5"]
    script = (
        "import sys\nfrom shared.data import open_source\n"
        f"for name in {names!r}:\n"
        "    source = open_source('reasoning-gym:' + name, where='w')\n"
        "    print([source.row(i) for i in range(len(source))])\n"
        "assert 'torch' not in sys.modules\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(seen) == 1
    assert next(iter(seen)).count("reasoning_gym") == 18


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("chain_sums", "did you mean 'chain_sum'?"),
        ("chain_sum?sise=3", "did you mean 'size'?"),
        ("chain_sum?min_terms=0", "refuses its parameters"),
        ("chain_sum?size=many", "refuses its parameters"),
    ],
)
def test_an_unknown_reasoning_gym_data_set_or_option_causes_a_one_line_error(source: str, says: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(DataError) as caught:
        open_source(f"reasoning-gym:{source}", where=WHERE)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_package_that_is_not_installed_is_reported_with_the_command_that_installs_it() -> None:
    with pytest.raises(DataError, match="x: source 'y' needs the package no_such_package; run `make setup-rewards`"):
        require("no_such_package", "rewards", "x: source 'y'")


def test_a_generated_source_first_checks_that_its_package_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "reasoning_gym" else find_spec(name))
    with pytest.raises(DataError, match="needs the package reasoning_gym; run `make setup-rewards`"):
        open_source("reasoning-gym:chain_sum", where=WHERE)
