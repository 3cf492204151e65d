"""Tests that, for every type of message, the objects decoded from a body take up at most a small multiple of the body's
length."""

from __future__ import annotations

import tracemalloc
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from proto import codec
from proto.messages import Located
from proto.registry import all_messages

ELEMENTS = 5_000
TIMES = 50
"""Maximum memory of a decoded body, as a multiple of its length (SPEC section 7)."""
LOCATED_TIMES = 70
EMPTY_ARRAY = {b"nd": True, b"type": "|u1", b"kind": b"", b"shape": [0], b"data": b""}


def is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def least(hint: Any) -> Any:
    """Return the value with the shortest encoding, which omits fields that have a default."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is np.ndarray or origin is np.ndarray:
        return EMPTY_ARRAY
    if origin in (typing.Union, types.UnionType):
        return None if type(None) in inside else least(inside[0])
    if is_struct(hint):
        return with_field(hint, "", None)
    return {list: [], dict: {}, int: 1, float: 1, str: "", bool: True}[origin or hint]


def with_field(kind: type[msgspec.Struct], name: str, value: Any) -> Any:
    """Return a struct as it travels over the wire, with the field `name` set to `value`."""
    hints, fields = typing.get_type_hints(kind), msgspec.structs.fields(kind)
    if kind.__struct_config__.array_like:
        last = max((i for i, field in enumerate(fields) if field.required or field.name == name), default=-1)
        return [value if field.name == name else least(hints[field.name]) for field in fields[: last + 1]]
    return {
        field.encode_name: value if field.name == name else least(hints[field.name])
        for field in fields
        if field.required or field.name == name
    }


def heavy(hint: Any) -> Iterator[Any]:
    """Yield values of this type, each with one container that holds many elements."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        yield [least(inside[0])] * ELEMENTS
        yield from ([value] for value in heavy(inside[0]))
    elif origin is dict:
        yield {f"{number:x}": least(inside[1]) for number in range(ELEMENTS)}
    elif origin in (typing.Union, types.UnionType):
        for each in inside:
            yield from heavy(each)
    elif is_struct(hint):
        for name, field in typing.get_type_hints(hint).items():
            if name in hint.__struct_fields__:
                yield from (with_field(hint, name, value) for value in heavy(field))


@pytest.mark.parametrize("number", sorted(all_messages()))
def test_a_body_of_many_small_values_takes_up_a_small_multiple_of_its_length(number: int) -> None:
    kind = all_messages()[number]
    for value in heavy(kind):
        body = msgspec.msgpack.encode(value)
        tracemalloc.start()
        try:
            assert isinstance(codec.decode_body(number, body), kind)
            built = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert built < (LOCATED_TIMES if kind is Located else TIMES) * len(body)
