"""Which type number is which message, and which reply answers which request. Filled once, at import, by `messages`."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import msgspec

from proto.errors import WireError


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message body: a msgpack map by field name. Unknown fields are ignored, so that minor versions can add some."""

    TYPE: ClassVar[int] = 0


M = TypeVar("M", bound=Message)


class Request(Message, frozen=True, kw_only=True):
    """A message that is answered by `REPLY` or by `messages.Error`, exactly once."""

    REPLY: ClassVar[type[Message]]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A part of a body that comes in numbers: a msgpack array by position. New fields are appended, with defaults."""


_BY_TYPE: dict[int, type[Message]] = {}


def message(number: int) -> Callable[[type[M]], type[M]]:
    """Class decorator: give a message its type number."""

    def register(cls: type[M]) -> type[M]:
        if number in _BY_TYPE or not 0 < number < 65536:
            raise ValueError(f"message type {number}: taken by {_BY_TYPE.get(number)} or outside 1..65535")
        cls.TYPE = number
        _BY_TYPE[number] = cls
        return cls

    return register


def by_type(number: int) -> type[Message]:
    """The message class of a type number. Raises WireError for an unknown one."""
    cls = _BY_TYPE.get(number)
    if cls is None:
        raise WireError(f"message type {number}: unknown")
    return cls


def all_messages() -> dict[int, type[Message]]:
    """A copy of the whole table, for tests and for the specification's generator."""
    return dict(_BY_TYPE)
