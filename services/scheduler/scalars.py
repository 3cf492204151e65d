"""Per-sample values of a task (reward, length, ...) packed into bytes, and flattened into arrays for the driver.

One task's values are the concatenation of its columns, described by a layout that is shared by all tasks. Nothing per
token is ever here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from proto.tensors import Array

Layout = tuple[tuple[str, str], ...]
"""`(name, dtype)` of each column, in packing order."""


def layout_of(scalars: dict[str, Array]) -> Layout:
    return tuple((name, values.dtype.str) for name, values in scalars.items())


def pack(scalars: dict[str, Array], first: int, samples: int) -> bytes:
    """The values of samples `[first, first + samples)`, column after column."""
    return b"".join([values[first : first + samples].tobytes() for values in scalars.values()])


def flatten(layouts: Sequence[Layout], packed: Sequence[tuple[int, int, bytes]]) -> dict[str, Array]:
    """Arrays over all samples from `(layout, samples, bytes)` of each task, in order.

    A column that some task lacks is left out: it says nothing about the batch.
    """
    used = {layouts[layout] for layout, _, _ in packed}
    names = [column for column in layouts[packed[0][0]] if all(column in layout for layout in used)] if packed else []
    offsets = {(layout, column): _offset(layout, column) for layout in used for column in names}
    columns: dict[str, Array] = {}
    for column in names:
        name, dtype = column
        size = np.dtype(dtype).itemsize
        parts = []
        for layout, samples, data in packed:
            start = offsets[layouts[layout], column] * samples
            parts.append(data[start : start + samples * size])
        columns[name] = np.frombuffer(b"".join(parts), dtype=dtype)
    return columns


def column(layout: Layout, name: str, samples: int, data: bytes) -> Array | None:
    """One named column of one task, or None."""
    for each in layout:
        if each[0] == name:
            start = _offset(layout, each) * samples
            return np.frombuffer(data, dtype=each[1], count=samples, offset=start)
    return None


def _offset(layout: Layout, wanted: tuple[str, str]) -> int:
    """Bytes a sample of the columns before `wanted`."""
    total = 0
    for each in layout:
        if each == wanted:
            break
        total += np.dtype(each[1]).itemsize
    return total
