"""Compares the messages of a history regardless of how an agent has rewritten them.

Messages that a policy would read differently do not compare equal.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from services.rollout.sampling.prompts import tool_calls
from shared.data.source import content_text
from shared.workflow import Message

_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")


def same(one: Message, other: Message) -> bool:
    """Return whether both messages mean the same thing. Fields that agents add (such as refusal: null) are ignored."""
    # The messages are compared as JSON, in which True, 1 and 1.0 differ.
    return one is other or _encoded(_plain(one)) == _encoded(_plain(other))


def arguments(function: dict[str, Any]) -> Any:
    """Return a call's arguments as an object. OpenAI messages contain them as text instead."""
    given = function.get("arguments")
    if isinstance(given, str):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(given)
    return given


def called(calls: list[Any]) -> list[Any]:
    """Return [name, arguments] of each tool call in a message, without the call's other fields."""
    functions = [call.get("function") or {} for call in calls]
    return [[function.get("name"), arguments(function)] for function in functions]


def _plain(message: Message) -> dict[str, Any]:
    kept = {key: message[key] for key in _COMPARED if message.get(key)}
    if "content" in kept:
        kept["content"] = content_text(message)
    if message.get("role") == "assistant" and "tool_calls" in kept and isinstance(kept.get("content"), str):
        written = [[call.name, call.arguments] for call in tool_calls(kept["content"])]
        # An agent that returns the calls next to the text from which they were parsed has changed nothing.
        with contextlib.suppress(AttributeError, TypeError):
            if _encoded(called(kept["tool_calls"])) == _encoded(written):
                del kept["tool_calls"]
    return kept


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
