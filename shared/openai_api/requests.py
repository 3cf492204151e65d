"""Reads requests of OpenAI's API. Whatever cannot be done as requested is refused with one line.

Functions raise HTTPException for what they refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

BODY_LIMIT_BYTES = 16 << 20
MOST_CHOICES = 128
T = TypeVar("T")


async def body_of(request: Request) -> bytes:
    """Return the whole body, of at most `BODY_LIMIT_BYTES`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT_BYTES:
            raise HTTPException(413, f"the request exceeds {BODY_LIMIT_BYTES} bytes")
    return bytes(body)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a request to sample, whose other forms are not known yet."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the request is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise HTTPException(400, "the request is not an object")
    choices = asked.get("n")
    if choices is not None and (type(choices) is not int or not 1 <= choices <= MOST_CHOICES):
        raise HTTPException(400, f"n is {choices!r}, but must be a whole number from 1 to {MOST_CHOICES}")
    if asked.get("top_logprobs"):
        raise HTTPException(400, "top_logprobs: only the sampled token's log-prob is known")
    if asked.get("logit_bias"):
        raise HTTPException(400, "logit_bias would change the distribution that the log-probs describe")
    if asked.get("response_format") not in (None, {}, {"type": "text"}):
        raise HTTPException(
            400, "response_format must be text, since a grammar would change the distribution of the log-probs"
        )
    return asked


def chat_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a request for a chat completion."""
    asked = fields_of(body)
    if not isinstance(asked.get("messages"), list):
        raise HTTPException(400, "the request has no list of messages")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in asked["messages"]):
        raise HTTPException(400, "message message must be an object with a role")
    if not all(_is_calls(message.get("tool_calls")) for message in asked["messages"]):
        raise HTTPException(400, "tool_calls of a message must be a list of objects, each with an object `function`")
    if asked.get("tool_choice") not in (None, "auto", "none"):
        raise HTTPException(400, "tool_choice must be auto or none, since the policy cannot be forced to call a tool")
    if asked.get("functions"):
        raise HTTPException(400, "functions is not supported: use tools")
    return asked


def limit_of(asked: dict[str, Any]) -> int | None:
    """Return the maximum number of tokens of an answer, or None."""
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise HTTPException(400, f"max_tokens is {limit!r}, but must be a whole number above 0")
    return limit


def stops_of(asked: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts that end an answer."""
    stop = asked.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise HTTPException(400, "stop must be a string or a list of strings")
    return tuple(stops)


def tools_of(asked: dict[str, Any]) -> Any:
    """Return the tools that an answer may call, or None."""
    return asked.get("tools") if asked.get("tool_choice") != "none" else None


def _is_calls(calls: Any) -> bool:
    return calls is None or (
        isinstance(calls, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict | None) for call in calls)
    )
