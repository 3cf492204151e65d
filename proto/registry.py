"""Defines the registry of messages by type number, which `messages` fills at import, and the base classes of messages.

The message descriptions in SPEC.md come from the message classes: the docstring, with the message's own error codes
under `Errors:`, and for each field the comment beside it or the docstring below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import msgspec

from proto.errors import WireError


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message body: a msgpack map keyed by field name. Unknown fields are ignored, so minor versions can add
    fields."""

    TYPE: ClassVar[int] = 0


M = TypeVar("M", bound=Message)


class Request(Message, frozen=True, kw_only=True):
    """A message that is answered exactly once, with `REPLY` or `messages.Error`."""

    REPLY: ClassVar[type[Message]]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A repeated part of a body: a msgpack array, whose fields are identified by position. New fields are appended,
    with defaults."""


_BY_TYPE: dict[int, type[Message]] = {}


def message(number: int, *, reply: type[Message] | None = None) -> Callable[[type[M]], type[M]]:
    """Return a class decorator that sets the type number of a message class, and the `reply` of a request class."""

    def register(cls: type[M]) -> type[M]:
        if number in _BY_TYPE or not 0 < number < 65536:
            raise ValueError(f"message type {number}: taken by {_BY_TYPE.get(number)} or outside 1..65535")
        if issubclass(cls, Request) != (reply is not None):
            raise ValueError(f"message type {number}: a request, and only a request, has a reply")
        if issubclass(cls, Request) and reply is not None:
            cls.REPLY = reply
        cls.TYPE = number
        _BY_TYPE[number] = cls
        return cls

    return register


def by_type(number: int) -> type[Message]:
    """Return the message class for a type number. Raises WireError if it is unknown."""
    cls = _BY_TYPE.get(number)
    if cls is None:
        raise WireError(f"message type {number}: unknown")
    return cls


def all_messages() -> dict[int, type[Message]]:
    """Return a copy of the registry, for tests and the specification generator."""
    return dict(_BY_TYPE)
