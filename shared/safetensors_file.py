"""Writes a safetensors file one tensor at a time, so that no more than one has to be in memory. It does not import
torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import IO, Any, NamedTuple

CODES: Mapping[str, str] = MappingProxyType({"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"})
"""The format's names of the floating-point types."""
_ALIGNMENT = 8


class Entry(NamedTuple):
    """What the header says about a tensor. `dtype` is the format's name of its type."""

    dtype: str
    shape: Sequence[int]
    nbytes: int


def write(file: IO[bytes], entries: Mapping[str, Entry], data: Callable[[str], memoryview]) -> int:
    """Write the tensors in the order of `entries`. `data(name)` returns the bytes of one. Return the number of bytes of
    all tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(_ALIGNMENT, "little") + text)
    for name in entries:
        file.write(data(name))
    file.flush()
    return end
