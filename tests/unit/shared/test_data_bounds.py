"""A data file costs memory and time in proportion to its size, whatever is written in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from shared.data import DataError, SourceLost, open_source
from shared.data.source import MOST_ROW_BYTES, read_rows

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
READ = """\
import resource, sys, time
from shared.data import DataError, open_source
from shared.data.source import read_rows
import shared.data.tables
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    source = open_source(sys.argv[1], where="t.yaml:3")
    read = read_rows(source)
    print(len(source), len(read.bad), read.bad[0].message if read.bad else "")
    source.row(len(source) - 1)
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
print(time.process_time())
"""


def cost(source: str) -> tuple[list[str], int, float]:
    """Read all rows of a source in another process. Return what it prints, and the MiB and CPU seconds it needs."""
    done = subprocess.run(
        [sys.executable, "-c", READ, source], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    *lines, mib, seconds = done.stdout.splitlines()
    return lines, int(mib), float(seconds)


def repeated(value: Any, times: int) -> Any:
    """Return an array that refers to one value many times."""
    return pyarrow.DictionaryArray.from_arrays(np.zeros(times, np.int32), pyarrow.array([value]))


def in_one_list(array: Any) -> Any:
    return pyarrow.ListArray.from_arrays([0, len(array)], array)


def bomb(path: Path, column: Any, prompt: Any = None) -> str:
    table = pyarrow.table({"prompt": prompt if prompt is not None else repeated("1+1=", len(column)), "more": column})
    one_page = {"row_group_size": len(table), "max_rows_per_page": 1 << 30, "data_page_size": 1 << 30}
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False, **one_page)
    return f"parquet:{path}"


@pytest.mark.parametrize(
    "column",
    [lambda: repeated("x", 20_000_000), lambda: in_one_list(repeated(7, 20_000_000))],
    ids=["rows", "one list"],
)
def test_a_tiny_parquet_file_that_stands_for_gigabytes_is_refused_in_one_line(
    tmp_path: Path, column: Callable[[], Any]
) -> None:
    source = bomb(tmp_path / "bomb.parquet", column())
    assert (tmp_path / "bomb.parquet").stat().st_size < 2000
    (line,), mib, seconds = cost(source)
    assert line.startswith(f"t.yaml:3: source '{source}' is not read: ")
    assert "GiB of memory" in line
    assert "bytes: more than 1000 times as many is refused" in line
    assert mib < 50
    assert seconds < 20


def test_one_long_text_in_every_row_takes_up_memory_once(tmp_path: Path) -> None:
    source = bomb(tmp_path / "rows.parquet", repeated("x" * MIB, 300))
    assert (tmp_path / "rows.parquet").stat().st_size < 3000
    (line,), mib, _ = cost(source)
    assert line == "300 0 "
    assert mib < 100


def test_a_row_larger_than_the_limit_is_unusable_and_no_other_row_is(tmp_path: Path) -> None:
    texts = [repeated("x" * MIB, count) for count in (1, MOST_ROW_BYTES // MIB + 1, 2)]
    lists = pyarrow.ListArray.from_arrays(
        [0, *np.cumsum([len(each) for each in texts])],
        repeated("x" * MIB, sum(map(len, texts))),
    )
    source = bomb(tmp_path / "rows.parquet", lists)
    (line,), mib, _ = cost(source)
    assert line.startswith(f"3 1 {tmp_path / 'rows.parquet'} row 1: a row of 64 MiB or more: a row may have 64 MiB")
    assert mib < 100


def test_a_large_data_set_of_ordinary_rows_is_read(tmp_path: Path) -> None:
    rows = 20_000
    system = "You are a helpful assistant with many tools. " * 100  # the same in every row, as tool definitions are
    prompts = [[{"role": "system", "content": system}, {"role": "user", "content": f"{at}+1="}] for at in range(rows)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts}), path, compression="zstd")
    assert path.stat().st_size * 100 < rows * len(system)
    source = open_source(f"parquet:{path}", where="t")
    assert source.row(rows - 1)["prompt"] == prompts[-1]
    read = read_rows(source)
    assert not read.bad
    assert read.longest is not None


def test_a_delta_encoded_column_is_read_as_far_as_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": ["x" * MIB] * 300})
    encoding = {"prompt": "DELTA_BYTE_ARRAY"}
    pyarrow.parquet.write_table(table, path, use_dictionary=False, column_encoding=encoding, compression="zstd")
    assert path.stat().st_size < 3000
    (line,), mib, _ = cost(f"parquet:{path}")
    assert line.startswith(f"{path}: row group 0 needs more than 256 MiB of memory; write the rows without")
    assert mib < 600


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN", None])
def test_every_encoding_of_texts_is_read(tmp_path: Path, encoding: str | None) -> None:
    prompts = [[{"role": "user", "content": f"{'long ' * 200}{at}"}] for at in range(3000)]
    columns = {"prompt": prompts, "more": [f"{at}" * 300 for at in range(3000)], "few": ["a", None, "b"] * 1000}
    path = tmp_path / "rows.parquet"
    options: dict[str, Any] = {"use_dictionary": True} if encoding is None else {"use_dictionary": False}
    if encoding is not None:
        options["column_encoding"] = {name: encoding for name in ("prompt.list.element.content", "more", "few")}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2000, **options)
    source = open_source(f"parquet:{path}", where="t")
    assert source.validate() == []
    for at in (0, 1, 1999, 2000, 2999):
        found = source.row(at)
        assert (found["prompt"], found["more"], found.get("few")) == tuple(columns[name][at] for name in columns)


def test_a_damaged_row_group_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rng = np.random.default_rng(0)
    table = pyarrow.table({"prompt": [str(each) for each in rng.random(5000)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[1000:2000] = bytes(1000)
    path.write_bytes(data)
    with pytest.raises(SourceLost, match=r"row group 0 cannot be read: .*; write the file again") as caught:
        open_source(f"parquet:{path}", where="t").validate()
    assert "\n" not in str(caught.value)


def test_a_line_without_an_end_is_read_in_parts_and_unusable(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = b'{"prompt": "1+1="}\n'
    with path.open("wb") as file:
        file.write(row * 3 + b'{"prompt": "')
        file.truncate(512 << 20)  # a hole, which takes up no disk
    (found, refused), mib, seconds = cost(f"jsonl:{path}")
    assert refused == f"{path}:4: a row of 512 MiB or more: a row may have 64 MiB; shorten it, or leave it out"
    assert found == f"4 1 {refused}"
    assert mib < 250
    assert seconds < 30


def test_rows_after_a_line_that_is_too_long_keep_their_index_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "a"}\n')
        file.write(json.dumps({"prompt": "x" * MOST_ROW_BYTES}).encode())
        file.write(b'\n\n{"prompt": "b"}\n')
    source = open_source(f"jsonl:{path}", where="t")
    assert (len(source), source.row(2), source.place(2)) == (3, {"prompt": "b"}, f"{path}:4")
    assert [(error.index, error.line) for error in source.validate()] == [(1, 2)]
    with pytest.raises(DataError, match="a row of 64 MiB or more"):
        source.row(1)
    assert source.content(1) != source.content(0)
