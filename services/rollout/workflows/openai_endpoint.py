"""Serves OpenAI's chat-completions API to agents that know nothing about rlbus.

Each call is captured in the sample whose base URL it was sent to. The endpoint listens on the loopback interface only.
A request may shorten an answer (max_tokens, stop) but cannot change the sampling distribution: its temperature, top_p,
penalties and seed are overridden by the topology's sampling settings, and the response header `x-overridden` names the
overridden fields. The first request changed in this way is also reported in the log and on the console.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from proto.messages import Trouble, TroubleKind
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.conversation import arguments, called
from shared.data.source import content_text
from shared.guest_server import GuestServer, prove
from shared.workflow import ContextFull, Message, Turn, WorkflowError

BODY_LIMIT_BYTES = 16 << 20
MOST_CHOICES = 128
_NEUTRAL = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,)}
"""Values of fields that request what happens anyway. The first one describes it."""
_MARKUP = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)
_JSON = "application/json"
_NO_SAMPLE = "no running sample has this address: use ctx.base_url of a running workflow"
T = TypeVar("T")


@dataclass(frozen=True)
class _Handed:
    """A message with tool calls as the client received it, and the text that was sampled for it."""

    message: Message
    text: str


@dataclass(eq=False)
class _Session:
    """The calls of one sample. `called` maps the id of a message's first tool call to the message handed out."""

    calls: SampleCalls
    called: dict[str, _Handed] = field(default_factory=dict)


class OpenAIEndpoint:
    """Serves the calls of running samples. It runs on the service's loop; any thread may call `open` and `close`."""

    def __init__(self, model: str) -> None:
        """`model` is the model name in responses; requests may name any model."""
        self._model = model
        self._sessions: dict[str, _Session] = {}
        self._tokens: dict[SampleCalls, str] = {}
        self._numbers = itertools.count(1)
        self._server = GuestServer(self._application())
        self._changed: dict[str, str] = {}
        self._log = structlog.get_logger("openai-endpoint")

    async def start(self) -> None:
        """Listen on a free port on the loopback interface."""
        await self._server.start()

    async def stop(self) -> None:
        """Close every connection, which cancels its call."""
        await self._server.stop()

    def open(self, calls: SampleCalls) -> str:
        """Return the base URL for one sample's calls. The URL never changes, and any client that knows it may make
        calls."""
        token = self._tokens.get(calls)
        if token is None:
            token = self._tokens[calls] = secrets.token_urlsafe(16)
            self._sessions[token] = _Session(calls)
        return f"http://{self._server.address}/s/{token}/v1"

    def close(self, calls: SampleCalls) -> None:
        """Forget a sample: calls to its base URL are refused from now on."""
        token = self._tokens.pop(calls, None)
        if token is not None:
            self._sessions.pop(token, None)

    def troubles(self) -> list[Trouble]:
        """Return the problems to report in the heartbeat: the settings that agents request but do not get."""
        if not self._changed:
            return []
        asked = ", ".join(self._changed.values())
        return [Trouble(TroubleKind.OVERRIDDEN, f"an agent asks for {asked}: the topology decides how to sample")]

    def _changes(self, asked: dict[str, Any], temperature: float) -> list[str]:
        """Return the fields of a request that is sampled differently from what they ask for. Record the first request
        for each of them, except for a seed, which changes no distribution."""
        changes = []
        for name, neutral in {"temperature": (temperature,), **_NEUTRAL}.items():
            value = asked.get(name)
            if value is None or value in neutral:
                continue
            changes.append(name)
            if name not in self._changed:
                self._changed[name] = f"{name} {value!r:.20} and gets {neutral[0]:g}"
                self._log.warning("an agent's sampling is overridden", field=name, asked=f"{value!r:.20}")
        return changes + ["seed"] * (asked.get("seed") is not None)

    # ---- HTTP

    def _application(self) -> Starlette:
        routes = [
            Route("/s/{token}/v1/models", self._models),
            Route("/s/{token}/v1/chat/completions", self._chat_completions, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            404: self._not_found,
            405: self._not_found,
            HTTPException: _refuse,
            WorkflowError: _refuse,
            ClientDisconnect: _refuse,  # the answer is discarded
            Exception: self._failed,
        }
        application = Starlette(routes=routes, exception_handlers=handlers)
        application.router.redirect_slashes = False
        return application

    async def _models(self, request: Request) -> Response:
        self._session(request)
        models = [{"id": self._model, "object": "model", "owned_by": "rlbus"}]
        return Response(msgspec.json.encode({"object": "list", "data": models}), media_type=_JSON)

    async def _chat_completions(self, request: Request) -> Response:
        session = self._session(request)
        asked = _asked(await _body(request))
        overridden = self._changes(asked, session.calls.temperature)
        headers = {"x-overridden": ",".join(overridden)} if overridden else {}
        turns = await _unless_gone(request, _choices(session, asked))
        whole = self._completion(session, turns, asked)
        if asked.get("stream"):
            events = b"".join(b"data: " + chunk + b"\n\n" for chunk in _chunks(whole, asked))
            return Response(events, media_type="text/event-stream", headers=headers)
        return Response(msgspec.json.encode(whole), media_type=_JSON, headers=headers)

    def _session(self, request: Request) -> _Session:
        session = self._sessions.get(request.path_params["token"])
        if session is None:
            raise HTTPException(404)
        prove(request.scope)
        return session

    async def _not_found(self, request: Request, _: Exception) -> Response:
        parts = request.scope["path"].split("/", 4)
        is_session = len(parts) == 5 and parts[3] == "v1" and parts[2] in self._sessions
        only = "only POST chat/completions and GET models are served"
        return _error(404, f"no {request.method} {parts[4]}: {only}" if is_session else _NO_SAMPLE)

    async def _failed(self, request: Request, error: Exception) -> Response:
        self._log.error("call failed", exc_info=error)
        return _error(500, f"{type(error).__name__}; see the log of the rollout service", kind="server_error")

    def _completion(self, session: _Session, turns: list[Turn], asked: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        choices = [self._choice(session, turn, asked, f"{number}_{index}", index) for index, turn in enumerate(turns)]
        prompted, sampled = turns[0].prompt_tokens, sum(len(turn.token_ids) for turn in turns)
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompted,
                "completion_tokens": sampled,
                "total_tokens": prompted + sampled,
            },
        }

    def _choice(self, session: _Session, turn: Turn, asked: dict[str, Any], name: str, index: int) -> dict[str, Any]:
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
            message["content"] = _MARKUP.sub("", turn.text) or None
            session.called[message["tool_calls"][0]["id"]] = _Handed(message, turn.text)
            finish = "tool_calls"
        logprobs = None
        if asked.get("logprobs"):
            pairs = zip(turn.token_ids, turn.logprobs, strict=True)
            tokens: list[dict[str, Any]] = [
                {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
                for token, value in pairs
            ]
            logprobs = {"content": tokens, "refusal": None}
        return {"index": index, "message": message, "finish_reason": finish, "logprobs": logprobs}


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_LIMIT_BYTES:
            raise HTTPException(413, f"the request exceeds {BODY_LIMIT_BYTES} bytes")
    return bytes(body)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    return _error(400, str(error), "context_length_exceeded" if isinstance(error, ContextFull) else None)


def _error(status: int, message: str, code: str | None = None, kind: str = "invalid_request_error") -> Response:
    error = {"message": message, "type": kind, "param": None, "code": code}
    return Response(msgspec.json.encode({"error": error}), status, media_type=_JSON)


def _asked(body: bytes) -> dict[str, Any]:
    """Return the fields of the request. Raises HTTPException for anything that cannot be done as requested."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, f"the request is not valid JSON: {error}") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
        raise HTTPException(400, "the request has no list of messages")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in asked["messages"]):
        raise HTTPException(400, "message message must be an object with a role")
    if not all(_is_calls(message.get("tool_calls")) for message in asked["messages"]):
        raise HTTPException(400, "tool_calls of a message must be a list of objects, each with an object `function`")
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
    if asked.get("tool_choice") not in (None, "auto", "none"):
        raise HTTPException(400, "tool_choice must be auto or none, since the policy cannot be forced to call a tool")
    if asked.get("functions"):
        raise HTTPException(400, "functions is not supported: use tools")
    return asked


def _is_calls(calls: Any) -> bool:
    return calls is None or (
        isinstance(calls, list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict | None) for call in calls)
    )


async def _choices(session: _Session, asked: dict[str, Any]) -> list[Turn]:
    """Return `n` answers to the request's messages, each in its own sequence. One of them may continue an existing
    sequence."""
    calls = [asyncio.create_task(_chat(session, asked)) for _ in range(asked.get("n") or 1)]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _chat(session: _Session, asked: dict[str, Any]) -> Turn:
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise HTTPException(400, f"max_tokens is {limit!r}, but must be a whole number above 0")
    stop = asked.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
        raise HTTPException(400, "stop must be a string or a list of strings")
    tools = asked.get("tools") if asked.get("tool_choice") != "none" else None
    messages = [_message(session, message) for message in asked["messages"]]
    return await session.calls.chat(messages, tools, max_new_tokens=limit, stop=tuple(stops))


def _message(session: _Session, message: Message) -> Message:
    """Return the message for the chat template. An unedited answer from the policy is replaced by the sampled text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    handed = session.called.get(str(calls[0].get("id")))
    if handed is not None and _canonical(message) == _canonical(handed.message):
        return {"role": "assistant", "content": handed.text}
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _canonical(message: Message) -> tuple[str, list[Any], bytes]:
    """Return the canonical form of a message with tool calls: its role, the calls' ids, and its content and calls as
    JSON."""
    calls = message["tool_calls"]
    said = [content_text(message) or "", called(calls)]
    return message["role"], [call.get("id") for call in calls], msgspec.json.encode(said, order="sorted")


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as an object, as templates expect. In OpenAI messages, they are a string."""
    function = call.get("function") or {}
    return {**call, "function": {**function, "arguments": arguments(function)}} if "arguments" in function else call


def _chunks(whole: dict[str, Any], asked: dict[str, Any]) -> Iterator[bytes]:
    """Yield a finished completion as a stream. Its text is sent in one piece, because completions are sampled in
    blocks."""
    head = {**whole, "object": "chat.completion.chunk"}
    head.pop("usage")
    for choice in whole["choices"]:
        delta = {key: value for key, value in choice["message"].items() if value is not None}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta["tool_calls"])]
        first = {"index": choice["index"], "delta": delta, "finish_reason": None, "logprobs": choice["logprobs"]}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
        for part in (first, last):
            yield msgspec.json.encode({**head, "choices": [part]})
    if (asked.get("stream_options") or {}).get("include_usage"):
        yield msgspec.json.encode({**head, "choices": [], "usage": whole["usage"]})
    yield b"[DONE]"
