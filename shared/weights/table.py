"""The table of the tensors in a transfer, which both ends share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from proto import dtypes
from proto.messages import TransferParameter


def described(tensors: Mapping[str, Tensor]) -> list[TransferParameter]:
    """Return one row for each of `tensors`, in order. Raises WireError for a dtype that cannot be sent."""
    return [
        TransferParameter(name, dtypes.by_name(str(each.dtype).removeprefix("torch.")).name, list(each.shape))
        for name, each in tensors.items()
    ]


def room_for(parameters: Sequence[TransferParameter]) -> dict[str, Tensor]:
    """Return uninitialised host memory for `parameters`, in order. Raises WireError for an unknown dtype."""
    return {
        each.name: torch.empty(each.shape, dtype=getattr(torch, dtypes.by_name(each.dtype).name)) for each in parameters
    }


def in_parts(parameters: Sequence[TransferParameter], limit_bytes: int | None = None) -> list[slice]:
    """Return consecutive parts of `parameters`, each with at most `limit_bytes` or a single tensor. There is at least
    one part."""
    begins, total = [0], 0
    for at, each in enumerate(parameters):
        size = nbytes([each])
        if limit_bytes is not None and at > begins[-1] and total + size > limit_bytes:
            begins.append(at)
            total = 0
        total += size
    return [slice(begin, end) for begin, end in pairwise([*begins, len(parameters)])]


def nbytes(parameters: Sequence[TransferParameter]) -> int:
    """Return the total size of `parameters` in bytes."""
    total = 0
    for each in parameters:
        size = dtypes.by_name(each.dtype).itemsize
        for length in each.shape:
            size *= length
        total += size
    return total
