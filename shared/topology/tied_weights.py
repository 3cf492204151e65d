"""Compares weights that a model's configuration ties with the values in its files.

An engine keeps one tensor for tied weights and ignores copies in the files. If a copy differs, the model is ambiguous.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from proto.tensors import Array
from shared.topology import model_files
from shared.topology.model_files import Stored

_BLOCK = 1 << 22
"""Maximum number of elements that are compared at once."""
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Types in files whose values are compared. A bfloat16 is the upper half of a float32."""


def ambiguity(model: str) -> str:
    """Return, on one line, which tensors in the folder are tied but differ, and a remedy; or an empty string.

    The values are read only if the files hold a tied tensor twice. Raises the errors of `stored_tensors`.
    """
    tensors = model_files.stored_tensors(model)
    for *copies, original in model_files.tied_tables(model_files.read_config(model), tensors):
        for copy in copies:
            if not _equal(tensors[copy], tensors[original]):
                return difference(copy, original)
    return ""


def difference(copy: str, original: str) -> str:
    """Return the text about the tensor `copy` that is tied to `original` but differs from it."""
    return (
        f"config.json ties {copy} to {original} (tie_word_embeddings: true), but they differ in the model's files; "
        f"remove {copy} from the files or, to keep it as a separate weight, set tie_word_embeddings to false"
    )


def _equal(one: Stored, other: Stored) -> bool:
    """Return whether two tensors of the same shape have the same values. Types that numpy cannot convert never equal
    another type."""
    if one.dtype != other.dtype and not {one.dtype, other.dtype} <= _TYPES.keys():
        return False
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(_blocks(one), _blocks(other), strict=True))


def _blocks(tensor: Stored) -> Iterator[Array]:
    """Yield the values of a tensor in order, or its bytes if numpy does not have the type."""
    dtype = np.dtype(_TYPES.get(tensor.dtype, "u1"))
    count = (tensor.end - tensor.start) // dtype.itemsize
    values = np.memmap(tensor.file, dtype, "r", tensor.start, (count,))
    for start in range(0, count, _BLOCK):
        block = values[start : start + _BLOCK]
        yield (block.astype("<u4") << 16).view("<f4") if tensor.dtype == "BF16" else block
