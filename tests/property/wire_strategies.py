"""Provides hypothesis strategies for every message of the catalogue and every array that can be sent."""

from __future__ import annotations

import types
import typing
from typing import Any

import ml_dtypes  # noqa: F401  # registers bfloat16 and the float8 types with numpy
import msgspec
import numpy as np
from hypothesis import strategies as st

from proto import dtypes, messages  # noqa: F401  # messages fills the registry
from proto.codec import INLINE_TYPES
from proto.registry import Message, all_messages
from proto.tensors import Array

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
INTEGERS = st.integers(-(2**63), 2**64 - 1)


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype[Any], max_bytes: int = 4096) -> Array:
    """Draw any bytes as `dtype` in any shape of up to 8 dimensions, sometimes not contiguous."""
    shape = draw(st.lists(st.integers(0, 4), max_size=8))
    while int(np.prod(shape)) * dtype.itemsize > max_bytes:
        shape.pop()
    count = int(np.prod(shape))
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == np.bool_:
        data = bytes(byte & 1 for byte in data)
    array = np.frombuffer(data, dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


def any_array() -> st.SearchStrategy[Array]:
    return st.sampled_from([row.numpy for row in dtypes.TABLE]).flatmap(arrays)


def inline_array() -> st.SearchStrategy[Array]:
    return st.sampled_from(sorted(INLINE_TYPES)).flatmap(lambda kind: arrays(np.dtype(kind)))


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a field's annotated type."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is np.ndarray or origin is np.ndarray:
        return inline_array()
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(each) for each in inside])
    if origin is list:
        return st.lists(of_type(inside[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(of_type(inside[0]), of_type(inside[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return of_struct(hint)
    plain = {str: TEXT, int: INTEGERS, float: st.floats(), bool: st.booleans(), bytes: st.binary(max_size=200)}
    return (plain | {type(None): st.none()})[hint]


def of_struct(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{name: of_type(hints[name]) for name in cls.__struct_fields__})


def any_message() -> st.SearchStrategy[Message]:
    return st.sampled_from(sorted(all_messages())).flatmap(lambda number: of_struct(all_messages()[number]))


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal. NaN equals NaN, and arrays and structs are compared by content."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and np.ascontiguousarray(left).tobytes() == np.ascontiguousarray(right).tobytes()
        )
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and (left == right or (left != left and right != right))
