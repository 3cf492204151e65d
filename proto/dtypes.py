"""The closed table of tensor element types. A code is never reused for another type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from proto.errors import WireError


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the table: wire code, public name (as in torch), numpy dtype and bytes per element."""

    code: int
    name: str
    numpy: np.dtype[Any]

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize


TABLE: tuple[DType, ...] = (
    DType(1, "bool", np.dtype(np.bool_)),
    DType(2, "uint8", np.dtype("<u1")),
    DType(3, "int8", np.dtype("<i1")),
    DType(4, "uint16", np.dtype("<u2")),
    DType(5, "int16", np.dtype("<i2")),
    DType(6, "uint32", np.dtype("<u4")),
    DType(7, "int32", np.dtype("<i4")),
    DType(8, "uint64", np.dtype("<u8")),
    DType(9, "int64", np.dtype("<i8")),
    DType(10, "float16", np.dtype("<f2")),
    DType(11, "bfloat16", np.dtype(ml_dtypes.bfloat16)),
    DType(12, "float32", np.dtype("<f4")),
    DType(13, "float64", np.dtype("<f8")),
    DType(14, "float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
    DType(15, "float8_e5m2", np.dtype(ml_dtypes.float8_e5m2)),
    DType(16, "float8_e4m3fnuz", np.dtype(ml_dtypes.float8_e4m3fnuz)),
    DType(17, "float8_e5m2fnuz", np.dtype(ml_dtypes.float8_e5m2fnuz)),
    DType(18, "float8_e8m0fnu", np.dtype(ml_dtypes.float8_e8m0fnu)),
)
_BY_CODE = {row.code: row for row in TABLE}
_BY_NAME = {row.name: row for row in TABLE}
_BY_NUMPY = {row.numpy: row for row in TABLE}


def by_code(code: int) -> DType:
    """Return the table row of a wire code. Raises WireError for a code outside the table."""
    row = _BY_CODE.get(code)
    if row is None:
        raise WireError(f"dtype code {code}: not in the table (1..{TABLE[-1].code})")
    return row


def by_name(name: str) -> DType:
    """Return the table row of a public name such as `bfloat16`. Raises WireError for an unknown name."""
    row = _BY_NAME.get(name)
    if row is None:
        raise WireError(f"dtype {name!r}: not in the table; use one of {', '.join(_BY_NAME)}")
    return row


def by_numpy(dtype: np.dtype[Any]) -> DType:
    """Return the table row of a numpy dtype in any byte order.

    Raises WireError for object, string, complex and structured dtypes.
    """
    row = _BY_NUMPY.get(dtype) or _BY_NUMPY.get(dtype.newbyteorder("<"))
    if row is None:
        raise WireError(f"dtype {dtype}: cannot be sent; use one of {', '.join(_BY_NAME)}")
    return row
