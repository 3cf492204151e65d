"""Converts between numpy arrays and torch tensors, for every dtype in the wire format. Conversions preserve every bit
and share memory where possible.

Lightweight services do not import this module, even indirectly, because it imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from proto import dtypes
from proto.tensors import Array

_NAMES = {getattr(torch, row.name): row.name for row in dtypes.TABLE}
# Types that torch and numpy cannot exchange. Integers of the same size carry their bits.
_CARRIERS = {
    "bfloat16": (torch.int16, np.dtype("<i2")),
    "float8_e4m3fn": (torch.uint8, np.dtype("u1")),
    "float8_e5m2": (torch.uint8, np.dtype("u1")),
    "float8_e4m3fnuz": (torch.uint8, np.dtype("u1")),
    "float8_e5m2fnuz": (torch.uint8, np.dtype("u1")),
    "float8_e8m0fnu": (torch.uint8, np.dtype("u1")),
}


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return an array of the same shape, strides and bits. The array shares the tensor's memory unless the tensor is on
    a device.

    Raises WireError for a dtype outside `proto.dtypes`.
    """
    row = _row(tensor)
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    carrier = _CARRIERS.get(row.name)
    array: Array = host.numpy() if carrier is None else host.view(carrier[0]).numpy()
    return array if carrier is None else array.view(row.numpy)


def numpy_dtype(tensor: torch.Tensor) -> np.dtype[Any]:
    """Return the dtype of `to_numpy(tensor)`. Raises WireError for a dtype outside `proto.dtypes`."""
    return _row(tensor).numpy


def _row(tensor: torch.Tensor) -> dtypes.DType:
    return dtypes.by_name(_NAMES.get(tensor.dtype, str(tensor.dtype)))


def to_torch(array: Array) -> torch.Tensor:
    """Return a tensor of the same shape and bits that shares memory with `array` if possible.

    The array is copied if torch cannot represent it: if it is read-only (torch has no read-only tensors), is
    big-endian, has negative strides, or is not aligned to its elements. Raises WireError for a dtype outside
    `proto.dtypes`.
    """
    row = dtypes.by_numpy(array.dtype)
    if array.dtype != row.numpy:
        array = array.astype(row.numpy)
    if (
        not array.flags.writeable
        or not array.flags.aligned
        or any(stride % row.itemsize or stride < 0 for stride in array.strides)
    ):
        array = array.copy()
    carrier = _CARRIERS.get(row.name)
    if carrier is None:
        return torch.from_numpy(array)
    tensor: torch.Tensor = torch.from_numpy(array.view(carrier[1])).view(getattr(torch, row.name))
    return tensor
