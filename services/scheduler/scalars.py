"""Per-sample values of a task (reward, length, ...): columns packed into bytes, and arrays over a batch for the driver.

The columns are described by a layout, which many tasks share. Per-token values are not stored here.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the values of samples `[first, first + samples)`, column after column."""
    return b"".join(values[first : first + samples].tobytes() for values in scalars.values())


def unpack(layout: Layout, samples: int, data: bytes) -> dict[str, Array]:
    """Return the columns of one task, each of shape [samples]."""
    columns: dict[str, Array] = {}
    at = 0
    for name, dtype in layout:
        columns[name] = np.frombuffer(data, dtype, samples, at)
        at += columns[name].nbytes
    return columns


def flatten(layouts: Sequence[Layout], packed: Sequence[tuple[int, int, bytes]]) -> dict[str, Array]:
    """Return arrays over all samples, given `(layout, samples, bytes)` for each task in order.

    A column that any task lacks is left out, because it does not describe the whole batch. Float columns with a slash
    in their name (`NAMED`) are always kept, with NaN for missing values.
    """
    used = list(dict.fromkeys(layouts[layout] for layout, _, _ in packed))
    names = [column for column in used[0] if all(column in layout for layout in used)] if packed else []
    gappy = {column: None for layout in used for column in layout if NAMED in column[0] and column[1] in _FLOATS}
    tasks = [(samples, unpack(layouts[layout], samples, data)) for layout, samples, data in packed]
    merged: dict[str, Array] = {}
    for name, dtype in dict.fromkeys([*names, *sorted(gappy)]):
        missing = np.dtype(dtype)
        parts = [
            columns[name] if name in columns and columns[name].dtype == missing else np.full(samples, np.nan, missing)
            for samples, columns in tasks
        ]
        merged[name] = np.concatenate(parts)
    return merged
