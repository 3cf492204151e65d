"""Converts between numpy arrays and torch tensors, for every dtype in the wire format. Conversions preserve every bit
and share memory where possible.

Lightweight services do not import this module, even indirectly, because it imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from proto import dtypes
from proto.tensors import Array

_ALIGNMENT = 16
"""Arrays begin at multiples of this number of bytes in a packed tensor. It is a multiple of the size of every dtype."""
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


def to_device(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on `device` with the shapes and bits of `arrays`. On a CPU, they are the results of `to_torch`.

    Elsewhere, all arrays travel in one copy. On CUDA, the copy is made from page-locked memory and the host does not
    wait for it; for a copy from other memory, the host would wait for all earlier work of the device.
    """
    tensors = [to_torch(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    # The allocator of page-locked memory keeps the packed tensors until their copy is complete.
    return unpacked(packed(tensors, page_locked=device.type == "cuda").to(device, non_blocking=True), tensors)


def packed(tensors: Sequence[torch.Tensor], *, page_locked: bool = False) -> torch.Tensor:
    """Return a uint8 tensor that holds all tensors of the host, one after the other."""
    starts = _starts(tensors)
    whole = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=page_locked)
    for place, tensor in zip(unpacked(whole, tensors), tensors, strict=True):
        place.copy_(tensor)
    return whole


def unpacked(whole: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in `whole`, which is the result of `packed` for tensors of the shapes and dtypes of `like`."""
    return [
        whole[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(like, _starts(like)[:-1], strict=True)
    ]


def _starts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the byte at which each tensor begins in a packed tensor, and the size of the packed tensor."""
    return list(accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0))
