"""Converts Arrow arrays to the plain values of rows, as docs/your_code.md states them.

pyarrow's own conversion returns other types for nanoseconds if pandas is installed, and fails on some if it is not. It
also copies a value of a dictionary for each of its uses, which makes memory out of nothing: a file of a few hundred
bytes can use one long text millions of times. Here, all uses share one value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from itertools import islice, pairwise
from typing import Any

import pyarrow
from pyarrow import compute, types

_NANO = 1_000_000_000
_EPOCH = datetime(1970, 1, 1)
_FEW_VALUES = 16
"""Maximum number of values of a dictionary that are taken one by one, which is faster for a single row."""


def values(array: Any) -> list[Any]:
    """Return the values of an Array. Fields of structs that are null are absent, because Arrow gives all structs of a
    column the same fields.

    Raises ValueError, OverflowError or ArrowException if a value has no counterpart in Python, such as a date after the
    year 9999 or a text that is not UTF-8.
    """
    kind = array.type
    if types.is_string(kind):  # most columns
        return _plain(array)
    if isinstance(array, pyarrow.ExtensionArray):
        return values(array.storage)
    if types.is_dictionary(kind):
        return _of_dictionary(array)
    if types.is_struct(kind):
        return _structs(array)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _lists(array)
    if types.is_fixed_size_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        lengths, items = compute.list_value_length(array).to_pylist(), iter(values(array.flatten()))
        return [None if length is None else list(islice(items, length)) for length in lengths]
    if types.is_interval(kind):
        return [None if interval is None else list(interval) for interval in _plain(array)]
    text = _nanoseconds(kind)
    if text is not None:
        return [None if value is None else text(value) for value in array.cast(pyarrow.int64()).to_pylist()]
    return _plain(array)


def rows(table: Any) -> Iterator[dict[str, Any]]:
    """Return the rows of a RecordBatch, without the fields that are null. Raises the same errors as `values`."""
    return iter(_structs(table.to_struct_array()))


def _plain(array: Any) -> list[Any]:
    plain: list[Any] = array.to_pylist()
    return plain


def _of_dictionary(array: Any) -> list[Any]:
    indices = _plain(array.indices)
    used = sorted({index for index in indices if index is not None})
    if len(used) <= _FEW_VALUES:
        chosen = [value for index in used for value in values(array.dictionary.slice(index, 1))]
    else:
        chosen = values(array.dictionary.take(pyarrow.array(used)))
    shared = dict(zip(used, chosen, strict=True))
    return [shared.get(index) for index in indices]


def _structs(array: Any) -> list[Any]:
    names = [field.name for field in array.type]
    columns = [values(column) for column in array.flatten()]
    structs: list[Any] = [
        {name: value for name, value in zip(names, row, strict=True) if value is not None}
        for row in (zip(*columns, strict=True) if columns else [()] * len(array))
    ]
    return _with_nulls(array, structs)


def _lists(array: Any) -> list[Any]:
    """Return the lists of an array. Those of maps have pairs."""
    offsets = _plain(array.offsets)
    first = offsets[0]
    parts = [array.keys, array.items] if types.is_map(array.type) else [array.values]
    columns = [values(part.slice(first, offsets[-1] - first)) for part in parts]
    items = columns[0] if len(columns) == 1 else list(map(list, zip(*columns, strict=True)))
    return _with_nulls(array, [items[start - first : end - first] for start, end in pairwise(offsets)])


def _with_nulls(array: Any, made: list[Any]) -> list[Any]:
    if not array.null_count:
        return made
    return [value if valid else None for value, valid in zip(made, array.is_valid().to_pylist(), strict=True)]


def _nanoseconds(kind: Any) -> Callable[[int], Any] | None:
    """Return the function that converts nanoseconds of a type, or None for a type with another unit. Python's own types
    have microseconds, so other values become text."""
    if getattr(kind, "unit", "") != "ns":
        return None
    if types.is_duration(kind):
        return _duration
    if types.is_time(kind):
        return _time
    return _utc if kind.tz else _timestamp


def _timestamp(value: int) -> Any:
    seconds, rest = divmod(value, _NANO)
    return _fraction((_EPOCH + timedelta(seconds=seconds)).isoformat(), rest)


def _utc(value: int) -> str:
    return f"{_timestamp(value)}Z"


def _time(value: int) -> str:
    return _fraction((_EPOCH + timedelta(seconds=value // _NANO)).time().isoformat(), value % _NANO)


def _duration(value: int) -> Any:
    if value % 1000 == 0:
        return timedelta(microseconds=value // 1000)
    sign, (seconds, rest) = "-" if value < 0 else "", divmod(abs(value), _NANO)
    return f"{sign}PT{_fraction(str(seconds), rest)}S"


def _fraction(text: str, nanoseconds: int) -> str:
    if not nanoseconds:
        return text
    return f"{text}.{nanoseconds // 1000:06d}" if nanoseconds % 1000 == 0 else f"{text}.{nanoseconds:09d}"
