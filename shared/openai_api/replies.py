"""Writes the replies of OpenAI's API: completions, streams of them, and errors."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response

from shared.openai_api.tools import without_calls
from shared.workflow import Turn

_JSON = "application/json"
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def reply(body: Any, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(body), status, media_type=_JSON, headers=dict(headers))


def error(
    status: int,
    message: str,
    code: str | None = None,
    kind: str = "invalid_request_error",
    headers: Mapping[str, str] = _NO_HEADERS,
) -> Response:
    """Return the response to a request that failed."""
    return reply({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers)


def model_list(names: list[str]) -> dict[str, Any]:
    """Return the list of models."""
    return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "rlbus"} for name in names]}


def completion(
    kind: str, number: int, model: str, turns: list[Turn], choices: list[dict[str, Any]], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a completion of `kind` "chat.completion" or "text_completion": the choices for one prompt or several.

    `turns` are the answers from which the `choices` were made, `asked` is the request.
    """
    samples = asked.get("n") or 1
    prompted, sampled = sum(turn.prompt_tokens for turn in turns[::samples]), sum(len(turn.token_ids) for turn in turns)
    return {
        "id": f"{'chatcmpl' if kind == 'chat.completion' else 'cmpl'}-{number}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompted, "completion_tokens": sampled, "total_tokens": prompted + sampled},
    }


def chat_choice(turn: Turn, asked: Mapping[str, Any], name: str, index: int) -> dict[str, Any]:
    """Return an answer as a choice of a chat completion. `name` becomes a part of the ids of its tool calls."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": None}
    finish = turn.finish_reason
    if turn.tool_calls and asked.get("tools"):
        message["tool_calls"] = [
            {
                "id": f"call_{name}_{at}",
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for at, call in enumerate(turn.tool_calls)
        ]
        message["content"] = without_calls(turn.text) or None
        finish = "tool_calls"
    logprobs = None
    if asked.get("logprobs"):
        pairs = zip(turn.token_ids, turn.logprobs, strict=True)
        tokens: list[dict[str, Any]] = [
            {"token": _name(token), "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs
        ]
        logprobs = {"content": tokens, "refusal": None}
    return {"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs}


def text_choice(turn: Turn, asked: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return an answer as a choice of a text completion."""
    logprobs = None
    if asked.get("logprobs") is not None and asked["logprobs"] is not False:
        names = [_name(token) for token in turn.token_ids]
        logprobs = {"tokens": names, "token_logprobs": turn.logprobs, "top_logprobs": None, "text_offset": None}
    choice = {"index": index, "text": turn.text, "finish_reason": turn.finish_reason, "logprobs": logprobs}
    return choice | ({"token_ids": turn.token_ids} if asked.get("return_token_ids") else {})


def _name(token: int) -> str:
    return f"token_id:{token}"


def stream(whole: dict[str, Any], asked: Mapping[str, Any], headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """Return a finished completion as events, or as it is if no stream was asked for."""
    if not asked.get("stream"):
        return reply(whole, headers=headers)
    events = b"".join(b"data: " + chunk + b"\n\n" for chunk in _chunks(whole, asked))
    return Response(events, media_type="text/event-stream", headers=dict(headers))


def _chunks(whole: dict[str, Any], asked: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a finished completion as a stream. Its text is sent in one piece, because completions are sampled in
    blocks."""
    is_chat = whole["object"] == "chat.completion"
    head = {**whole, "object": "chat.completion.chunk" if is_chat else whole["object"]}
    head.pop("usage")
    for choice in whole["choices"]:
        for part in _halves(choice) if is_chat else (choice,):
            yield msgspec.json.encode({**head, "choices": [part]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield msgspec.json.encode({**head, "choices": [], "usage": whole["usage"]})
    yield b"[DONE]"


def _halves(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a chat choice: its message, and why it ended."""
    delta = {key: value for key, value in choice["message"].items() if value is not None}
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
    yield {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
    yield {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
