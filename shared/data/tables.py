"""Reads rows of Arrow tables (`parquet:/path/file.parquet`, `datasets:/path/folder`) with pyarrow alone.

Parquet files are read by row group, and the Arrow files of a data set are mapped. A few hundred bytes of a Parquet file
can stand for billions of values, so its metadata is checked before a value is read, and texts of a dictionary are kept
once (`arrow_values`).
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from shared.data import arrow_values
from shared.data.source import (
    MOST_ROW_BYTES,
    DataError,
    OnRow,
    Row,
    RowError,
    SourceLost,
    check_index,
    encoded,
    too_large,
    usable,
)

_CACHED_BYTES = 256 << 20
_BATCH_ROWS = 1024
_VALUE_BYTES = 40
"""Approximate size of a number in a list of Python."""
_SMALL_BYTES = 256 << 20
_MOST_EXPANSION = 1000
"""Maximum number of bytes in memory for each byte of a Parquet file that needs more than `_SMALL_BYTES`."""
_MOST_GROUP_BYTES = 4 << 30
_DICTIONARY = {"PLAIN_DICTIONARY", "RLE_DICTIONARY"}
_DELTA = {"DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"}
_UNREADABLE = (ValueError, OverflowError, pyarrow.ArrowException)


class TableSource:
    """Rows of consecutive tables: `table(k)` returns the k-th one, which has `sizes[k]` rows, or raises SourceLost."""

    def __init__(
        self,
        path: str,
        sizes: list[int],
        table: Callable[[int], Any],
        fields: Mapping[str, str],
        *,
        name: str,
        where: str,
    ) -> None:
        self.name = name
        self._fields = fields
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
        return _content(self._read(index))

    def _read(self, index: int) -> Row | Exception:
        check_index(index, len(self), self.name)
        at = bisect.bisect_right(self._starts, index) - 1
        (batch,) = self._table(at).slice(index - self._starts[at], 1).to_batches()
        (row,) = _rows(batch)
        return row

    def place(self, index: int) -> str:
        return f"{self.path} row {index}"

    def validate(self, on_row: OnRow | None = None) -> list[RowError]:
        errors = []
        for index, read in enumerate(self._every()):
            row = None
            try:
                row = self._checked(index, read)
            except DataError as error:
                errors.append(RowError(index=index, line=0, message=str(error)))
            if on_row is not None:
                on_row(_content(read), row)
        return errors

    def _every(self) -> Iterator[Row | Exception]:
        # Reading row by row is an order of magnitude slower than reading in batches.
        for at in range(len(self._starts) - 1):
            for batch in self._table(at).to_batches(max_chunksize=_BATCH_ROWS):
                yield from _rows(batch)

    def _checked(self, index: int, read: Row | Exception) -> Row:
        if isinstance(read, Exception):
            raise DataError(f"{self.place(index)}: cannot be read: {_line(read)}")
        if (nbytes := _size(read)) > MOST_ROW_BYTES:
            raise too_large(self.place(index), nbytes)
        return usable(read, self._fields, self.place(index), lambda: repr(read))


def _rows(batch: Any) -> list[Row | Exception]:
    """Return the rows of a RecordBatch, each or the reason why it cannot be read."""
    try:
        return list(arrow_values.rows(batch))
    except _UNREADABLE as error:
        if len(batch) == 1:
            return [error]
        return [row for at in range(len(batch)) for row in _rows(batch.slice(at, 1))]


def _content(read: Row | Exception) -> bytes:
    if isinstance(read, Exception):
        return _line(read).encode()
    return encoded(read) if (nbytes := _size(read)) <= MOST_ROW_BYTES else b"%d bytes" % nbytes


def _size(row: Row) -> int:
    """Return the approximate size of a row as text. It is not counted further than `MOST_ROW_BYTES`."""
    nbytes, values = 0, list(row.values())
    while values and nbytes <= MOST_ROW_BYTES:
        value = values.pop()
        if isinstance(value, str | bytes):
            nbytes += len(value)
        elif isinstance(value, dict | list):
            values += value.values() if isinstance(value, dict) else value
        nbytes += 1
    return nbytes


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def open_parquet(path: str, fields: Mapping[str, str], *, name: str, where: str) -> TableSource:
    """Open a Parquet file. Its row groups are read as needed and cached up to 256 MiB.

    Raises DataError if it cannot be read, or if its metadata says that it is too large for memory.
    """
    try:
        metadata = pyarrow.parquet.read_metadata(path, memory_map=True)
        delta, by_dictionary = _encodings(metadata)
        file = pyarrow.parquet.ParquetFile(path, memory_map=True, read_dictionary=by_dictionary)
        file_bytes = os.path.getsize(path)
    except (OSError, pyarrow.ArrowException) as error:
        why = f"{error}".splitlines()[0][:200]
        raise DataError(
            f"{where}: source {name!r} cannot be read: {why} ({os.path.abspath(path)}); "
            "give the path of a readable Parquet file"
        ) from None
    if problem := _size_problem(metadata, file_bytes):
        raise DataError(f"{where}: source {name!r} is not read: {os.path.abspath(path)} has {problem}")
    most = min(max(_SMALL_BYTES, _MOST_EXPANSION * file_bytes), _MOST_GROUP_BYTES)
    cache: OrderedDict[int, Any] = OrderedDict()

    def group(at: int) -> Any:
        table = cache.pop(at, None)
        if table is None:
            try:
                table = _read_group(file, path, at, most) if delta else file.read_row_group(at)
            except (OSError, pyarrow.ArrowException) as error:
                raise SourceLost(
                    f"{path}: row group {at} cannot be read: {_line(error)}; write the file again"
                ) from None
            while cache and sum(cached.nbytes for cached in cache.values()) + table.nbytes > _CACHED_BYTES:
                cache.popitem(last=False)
        cache[at] = table
        return table

    sizes = [metadata.row_group(at).num_rows for at in range(metadata.num_row_groups)]
    return TableSource(path, sizes, group, fields, name=name, where=where)


def _chunks(metadata: Any, at: int) -> list[Any]:
    group = metadata.row_group(at)
    return [group.column(column) for column in range(group.num_columns)]


def _encodings(metadata: Any) -> tuple[bool, list[str]]:
    """Return whether a column has texts that repeat parts of earlier ones, and the paths of the columns whose texts can
    be read as references to a dictionary, as they are stored."""
    encodings: dict[str, set[str]] = {}
    for at in range(metadata.num_row_groups):
        for chunk in _chunks(metadata, at):
            if chunk.physical_type == "BYTE_ARRAY":
                encodings.setdefault(chunk.path_in_schema, set()).update(chunk.encodings)
    if any(names & _DELTA for names in encodings.values()):
        return True, []  # pyarrow cannot read these as references
    return False, [path for path, names in encodings.items() if names & _DICTIONARY]


def _read_group(file: Any, name: str, at: int, most_bytes: int) -> Any:
    """Read a row group whose size in memory its metadata does not tell. Raises SourceLost above `most_bytes`."""
    largest = max([1, *(chunk.total_uncompressed_size for chunk in _chunks(file.metadata, at))])
    batches, nbytes = [], 0
    for batch in file.iter_batches(max(1, min(_BATCH_ROWS, _SMALL_BYTES // largest)), row_groups=[at]):
        batches.append(batch)
        nbytes += batch.nbytes
        if nbytes > most_bytes:
            raise SourceLost(
                f"{name}: row group {at} needs more than {most_bytes >> 20} MiB of memory; write the rows without the "
                "repetitions, or with smaller groups (row_group_size=10000)"
            )
    return pyarrow.Table.from_batches(batches)


def _size_problem(metadata: Any, file_bytes: int) -> str:
    """Return what makes a Parquet file too large for memory, with the remedy, or an empty string.

    The size of a row group is an upper bound: what its pages contain, decompressed, and a number for each value.
    """
    widths = [max(metadata.schema.column(column).length, _VALUE_BYTES) for column in range(metadata.num_columns)]
    groups = [
        sum(
            chunk.total_uncompressed_size + chunk.num_values * width
            for chunk, width in zip(_chunks(metadata, at), widths, strict=True)
        )
        for at in range(metadata.num_row_groups)
    ]
    if sum(groups) > max(_SMALL_BYTES, _MOST_EXPANSION * file_bytes):
        return (
            f"{metadata.num_rows} rows that need {sum(groups) / (1 << 30):.1f} GiB of memory, but only {file_bytes} "
            f"bytes: more than {_MOST_EXPANSION} times as many is refused; write the rows without the repetitions"
        )
    for at, nbytes in enumerate(groups):
        if nbytes > _MOST_GROUP_BYTES:
            return (
                f"a row group, number {at}, that needs {nbytes / (1 << 30):.1f} GiB of memory; the limit is "
                f"{_MOST_GROUP_BYTES >> 30} GiB; write the file with smaller groups (row_group_size=10000)"
            )
    return ""


def open_saved_dataset(path: str, split: str, fields: Mapping[str, str], *, name: str, where: str) -> TableSource:
    """Map the Arrow files of a data set saved by the `datasets` library (`Dataset.save_to_disk`).

    The folder is parsed here (state.json names the stream files), so the library need not be installed. For a saved
    DatasetDict, give the folder of one split or `?split=<name>`.
    """
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
    return TableSource(str(folder), sizes, tables.__getitem__, fields, name=name, where=where)


def _mapped(file: Path) -> Any:
    with pyarrow.memory_map(str(file)) as stream:
        return pyarrow.ipc.open_stream(stream).read_all()
