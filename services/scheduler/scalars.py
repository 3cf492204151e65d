"""Per-sample values of a task (reward, length, ...) packed into bytes, and flattened into arrays for the driver.

The values of a task are one bit per column, followed by the columns. A bit of 1 means that all samples have the same
value, which is stored once. Versions and truncation rarely differ within a task, and a million tasks must fit in
memory. A layout that tasks share describes the columns. Per-token values are not stored here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from proto.tensors import Array

NAMED = "/"
"""Separator in the names of the parts of a dict reward and of the metrics of a workflow."""
_FLOATS = frozenset({"<f4", "<f8"})
Layout = tuple[tuple[str, str], ...]
"""`(name, dtype)` of each column, in packing order."""


def layout_of(scalars: dict[str, Array]) -> Layout:
    return tuple((name, values.dtype.str) for name, values in scalars.items())


def pack(scalars: dict[str, Array], first: int, samples: int) -> bytes:
    """Return the packed values of samples `[first, first + samples)`."""
    columns: list[bytes] = []
    same = 0
    for number, values in enumerate(scalars.values()):
        column = values[first : first + samples].tobytes()
        one = column[: values.dtype.itemsize]
        if samples > 1 and column == one * samples:
            same |= 1 << number
            column = one
        columns.append(column)
    return same.to_bytes(_mask_bytes(len(scalars)), "little") + b"".join(columns)


def flatten(layouts: Sequence[Layout], packed: Sequence[tuple[int, int, bytes]]) -> dict[str, Array]:
    """Return arrays over all samples, given `(layout, samples, bytes)` of each task in order.

    A column that some task lacks is left out, because it does not describe the whole batch. Float
    columns with a slash in their name (`NAMED`) are always kept, with NaN for missing values.
    """
    used = list(dict.fromkeys(layouts[layout] for layout, _, _ in packed))
    names = [column for column in used[0] if all(column in layout for layout in used)] if packed else []
    gappy = {column: None for layout in used for column in layout if NAMED in column[0] and column[1] in _FLOATS}
    columns: dict[str, Array] = {}
    for column in dict.fromkeys([*names, *sorted(gappy)]):
        name, dtype = column
        parts = [
            _values(layouts[layout], column, samples, data)
            if column in layouts[layout]
            else np.full(samples, np.nan, dtype).tobytes()
            for layout, samples, data in packed
        ]
        columns[name] = np.frombuffer(b"".join(parts), dtype=dtype)
    return columns


def column(layout: Layout, name: str, samples: int, data: bytes) -> Array | None:
    """Return one column of one task by name, or None if the task does not have it."""
    for each in layout:
        if each[0] == name:
            return np.frombuffer(_values(layout, each, samples, data), dtype=each[1])
    return None


def _values(layout: Layout, wanted: tuple[str, str], samples: int, data: bytes) -> bytes:
    """Return the bytes of one column of one task, one value per sample. `data` is empty for a task without samples."""
    head = _mask_bytes(len(layout))
    begin, size, same = _place(layout, wanted, samples, data[:head])
    values = data[begin : begin + size]
    return values * samples if same else values


@lru_cache(maxsize=4096)
def _place(layout: Layout, wanted: tuple[str, str], samples: int, mask: bytes) -> tuple[int, int, bool]:
    """Return the location of a column: (first byte, bytes, whether it is one value for all samples)."""
    same = int.from_bytes(mask, "little")
    at = _mask_bytes(len(layout))
    for number, each in enumerate(layout):
        once = bool(same >> number & 1)
        size = np.dtype(each[1]).itemsize * (1 if once else samples)
        if each == wanted:
            return at, size, once
        at += size
    raise KeyError(wanted[0])


def _mask_bytes(columns: int) -> int:
    return -(-columns // 8)
