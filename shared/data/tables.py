"""Reads rows of Arrow tables (`parquet:/path/file.parquet`, `datasets:/path/folder`) with pyarrow alone.

Parquet files are read by row group, and the Arrow files of a data set are mapped.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.data.source import (
    SHOWN_CHARS,
    DataError,
    OnRow,
    Row,
    RowError,
    check_index,
    encoded,
    row_problem,
    with_prompt,
)

_CACHED_BYTES = 256 << 20
_BATCH_ROWS = 1024


class TableSource:
    """Rows of consecutive tables: `table(k)` returns the k-th one, which has `sizes[k]` rows. The field `prompt` holds
    the prompt."""

    def __init__(
        self, path: str, sizes: list[int], table: Callable[[int], Any], prompt: str, *, name: str, where: str
    ) -> None:
        self.name = name
        self._prompt = prompt
        self.path = path
        self._table = table
        self._starts = [0, *itertools.accumulate(sizes)]
        if not len(self):
            raise DataError(f"{where}: source {name!r} has no rows; write at least one with a prompt")

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Row:
        return self._checked(index, self._read(index))

    def content(self, index: int) -> bytes:
        return encoded(self._read(index))

    def _read(self, index: int) -> Row:
        check_index(index, len(self), self.name)
        at = bisect.bisect_right(self._starts, index) - 1
        row: Row = _without_nulls(self._table(at).slice(index - self._starts[at], 1).to_pylist()[0])
        return row

    def place(self, index: int) -> str:
        return f"{self.path} row {index}"

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        errors = []
        for at, start in enumerate(self._starts[:-1]):
            index = start
            # Reading row by row is an order of magnitude slower than reading in batches.
            for batch in self._table(at).to_batches(max_chunksize=_BATCH_ROWS):
                for row in map(_without_nulls, batch.to_pylist()):
                    if on_row is not None:
                        on_row(encoded(row))
                    try:
                        self._checked(index, row)
                    except DataError as error:
                        errors.append(RowError(index=index, line=0, message=str(error)))
                    index += 1
        return errors

    def _checked(self, index: int, row: Row) -> Row:
        row = with_prompt(row, self._prompt)
        problem = row_problem(row)
        if problem:
            shown = repr(row)
            text = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
            raise DataError(f"{self.place(index)}: {problem}: {text}")
        return row


def open_parquet(path: str, prompt: str, *, name: str, where: str) -> TableSource:
    """Open a Parquet file. Its row groups are read as needed and cached up to 256 MiB."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        why = f"{error}".splitlines()[0][:200]
        raise DataError(
            f"{where}: source {name!r} cannot be read: {why} ({os.path.abspath(path)}); "
            "give the path of a readable Parquet file"
        ) from None
    cache: OrderedDict[int, Any] = OrderedDict()

    def group(at: int) -> Any:
        table = cache.pop(at, None)
        if table is None:
            table = file.read_row_group(at)
            while cache and sum(cached.nbytes for cached in cache.values()) + table.nbytes > _CACHED_BYTES:
                cache.popitem(last=False)
        cache[at] = table
        return table

    sizes = [file.metadata.row_group(at).num_rows for at in range(file.metadata.num_row_groups)]
    return TableSource(path, sizes, group, prompt, name=name, where=where)


def open_saved_dataset(path: str, split: str, prompt: str, *, name: str, where: str) -> TableSource:
    """Map the Arrow files of a data set saved by the `datasets` library (`Dataset.save_to_disk`).

    The folder is parsed here (state.json names the stream files), so the library need not be installed. For a saved
    DatasetDict, give the folder of one split or `?split=<name>`.
    """
    import pyarrow

    folder = Path(path)
    try:
        if split:
            folder = folder / split
        elif (folder / "dataset_dict.json").is_file():
            splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
            raise DataError(f"{where}: source {name!r} has the splits {', '.join(splits)}; add ?split=<one of them>")
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise DataError(f"{where}: source {name!r} was saved with an index; save it after flatten_indices()")
        tables = [_mapped(folder / file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise DataError(
            f"{where}: source {name!r} cannot be read: {why}; give a folder written by Dataset.save_to_disk"
        ) from None
    sizes = [table.num_rows for table in tables]
    return TableSource(str(folder), sizes, tables.__getitem__, prompt, name=name, where=where)


def _mapped(file: Path) -> Any:
    import pyarrow

    with pyarrow.memory_map(str(file)) as stream:
        return pyarrow.ipc.open_stream(stream).read_all()


def _without_nulls(value: Any) -> Any:
    """Drop null fields at all levels. Arrow gives all rows of a table the same columns, and all messages in a column
    the same fields, with null for the absent ones."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
