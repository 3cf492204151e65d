"""Converts the values of the golden vectors to plain JSON, for implementations in any language."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from proto import dtypes
from proto.tensors import Array

EXACT = 2**53
"""Largest integer up to which all integers are exact in a float64."""


def plain(value: Any) -> Any:
    """Return a value in JSON: structs as maps by field name, inline arrays as {dtype, shape, hex}, integers above 2^53
    as strings of decimal digits.
    """
    if isinstance(value, np.ndarray):
        return {
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "hex": np.ascontiguousarray(value).tobytes().hex(),
        }
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, int) and abs(value) > EXACT:
        return str(value)
    return value


def tensor(array: Array) -> dict[str, Any]:
    """Return an array as a JSON tensor. `hex` holds its bytes in C order, little-endian."""
    row = dtypes.by_numpy(array.dtype)
    data = np.ascontiguousarray(array).astype(row.numpy, copy=False).tobytes()
    return {"dtype": row.name, "shape": list(array.shape), "hex": data.hex()}
