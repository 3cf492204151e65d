"""Calls of tools: in the text that a policy writes, and in OpenAI's messages."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import msgspec

from shared.workflow import Message, ToolCall

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_MARKUP = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)


def tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in an answer: each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` that parses."""
    calls = []
    for call_text in _TOOL_CALL.findall(text):
        try:
            call = msgspec.json.decode(call_text)
            calls.append(ToolCall(call["name"], dict(call.get("arguments") or {})))
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError):
            continue
    return calls


def without_calls(text: str) -> str:
    """Return an answer without the calls in it."""
    return _MARKUP.sub("", text)


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


def with_objects(message: Message) -> Message:
    """Return the message with the arguments of its calls as objects, as templates expect."""
    return {**message, "tool_calls": [_parsed(call) for call in message["tool_calls"]]}


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {**call, "function": {**function, "arguments": arguments(function)}} if "arguments" in function else call
