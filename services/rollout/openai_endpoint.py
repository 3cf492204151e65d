"""OpenAI's chat completions for agents that know nothing of us: every call is captured in the sample whose base URL it
came to. Must never listen beyond the loopback interface, nor let a request change the sampling distribution.

HTTP/1.1 is parsed by h11 (pure Python, no further packages); aiohttp and uvicorn + starlette would each bring several
more for one route. A request may shorten an answer (max_tokens, stop); its temperature, top_p, penalties and seed are
overridden by the topology's sampling, which the response's header `x-overridden` lists; what that changes is also told
once in the log and on the console.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import h11
import msgspec
import structlog

from proto.messages import Trouble, TroubleKind
from services.rollout.workflows.calls import SampleCalls
from services.rollout.workflows.messages import arguments, called, content_text
from shared.workflow import ContextFull, Message, Turn, WorkflowError

HOST = "127.0.0.1"
BODY_LIMIT_BYTES = 16 << 20
READ_BYTES = 1 << 16
IDLE_S = 600.0
MOST_CHOICES = 128
_OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_NEUTRAL = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,)}
"""Values that ask for what is done anyway."""
_MARKUP = re.compile(r"\s*<tool_call>.*?</tool_call>\s*", re.DOTALL)
_JSON = ("content-type", "application/json")


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class _Handed:
    """A message with tool calls as it was handed out, and the text that it was sampled as."""

    message: Message
    text: str


@dataclass(eq=False)
class _Session:
    """One sample's calls. `called`: what was handed out, by the id of its first tool call."""

    calls: SampleCalls
    called: dict[str, _Handed] = field(default_factory=dict)


class OpenAIEndpoint:
    """Belongs to the service's loop; `open` and `close` may be called from any thread."""

    def __init__(self, model: str) -> None:
        """`model`: the name it answers to; requests may name any."""
        self._model = model
        self._sessions: dict[str, _Session] = {}
        self._tokens: dict[SampleCalls, str] = {}
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._port = 0
        self._changed: dict[str, str] = {}
        self._log = structlog.get_logger("openai-endpoint")

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def open(self, calls: SampleCalls) -> str:
        """The base URL of one sample's calls, the same for each call. Whoever knows it may call."""
        token = self._tokens.get(calls)
        if token is None:
            token = self._tokens[calls] = secrets.token_urlsafe(16)
            self._sessions[token] = _Session(calls)
        return f"http://{HOST}:{self._port}/s/{token}/v1"

    def close(self, calls: SampleCalls) -> None:
        """Forget a sample: its base URL is none any more."""
        token = self._tokens.pop(calls, None)
        if token is not None:
            self._sessions.pop(token, None)

    def troubles(self) -> list[Trouble]:
        """For the heartbeat: what agents ask for and do not get."""
        if not self._changed:
            return []
        asked = ", ".join(self._changed.values())
        text = f"an agent asks for {asked}: overridden, sampled is as sampling.temperature says and from all tokens"
        return [Trouble(TroubleKind.OVERRIDDEN, text)]

    def _note_changed(self, asked: dict[str, Any], temperature: float) -> None:
        """The first request that is sampled otherwise than it asks for, for each field."""
        for name, neutral in {**_NEUTRAL, "temperature": (temperature,)}.items():
            value = asked.get(name)
            if value is not None and value not in neutral and name not in self._changed:
                self._changed[name] = f"{name} {value!r:.20}"
                self._log.warning("an agent's sampling is overridden", field=name, asked=f"{value!r:.20}")

    # ---- HTTP

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        link = _Link(reader, writer)
        try:
            while await self._one_request(link):
                pass
        except (h11.RemoteProtocolError, h11.LocalProtocolError, ConnectionError, TimeoutError) as error:
            self._log.info("connection ended", error=str(error))
        finally:
            writer.close()

    async def _one_request(self, link: _Link) -> bool:
        """Answer one request; whether the connection stays open."""
        request = await link.request()
        if request is None:
            return False
        method, path, body = request
        overridden: list[str] = []
        try:
            if len(body) > BODY_LIMIT_BYTES:
                raise _Refused(413, f"a request of more than {BODY_LIMIT_BYTES} bytes")
            session, route = self._route(path)
            if (method, route) == ("GET", "models"):
                answer: Any = {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "rlbus"}]}
                await link.answer(200, msgspec.json.encode(answer), [_JSON])
            elif (method, route) == ("POST", "chat/completions"):
                asked = _asked(body)
                overridden = [name for name in _OVERRIDDEN if asked.get(name) is not None]
                headers = [("x-overridden", ",".join(overridden))] if overridden else []
                self._note_changed(asked, session.calls.temperature)
                turns = await link.unless_gone(_choices(session, asked))
                if turns is None:
                    return False
                whole = self._completion(session, turns, asked)
                if asked.get("stream"):
                    await link.stream(_chunks(whole, asked), headers)
                else:
                    await link.answer(200, msgspec.json.encode(whole), [_JSON, *headers])
            else:
                raise _Refused(404, f"no {method} {route}, only POST chat/completions and GET models")
        except _Refused as error:
            await link.answer(error.status, _error(str(error), error.code), [_JSON])
        except ContextFull as error:
            await link.answer(400, _error(str(error), "context_length_exceeded"), [_JSON])
        except WorkflowError as error:
            await link.answer(400, _error(str(error), None), [_JSON])
        return link.next_cycle()

    def _route(self, path: str) -> tuple[_Session, str]:
        parts = path.partition("?")[0].split("/", 4)
        session = self._sessions.get(parts[2]) if len(parts) == 5 and parts[1] == "s" and parts[3] == "v1" else None
        if session is None:
            raise _Refused(404, "no sample is made at this address (any more): use ctx.base_url of a running workflow")
        return session, parts[4]

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


class _Link:
    """One HTTP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER)

    async def request(self) -> tuple[str, str, bytes] | None:
        """Method, path and body (cut past the limit) of the next request; None when the client has gone."""
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                async with asyncio.timeout(IDLE_S):
                    self._http.receive_data(await self._reader.read(READ_BYTES))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                if len(body) <= BODY_LIMIT_BYTES:
                    body += event.data
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return head.method.decode(), head.target.decode(), bytes(body)
            else:
                return None

    async def unless_gone(self, work: Any) -> Any:
        """The result of the coroutine `work`, or None, cancelling it, when the client goes away meanwhile."""
        working = asyncio.create_task(work)
        reading = asyncio.create_task(self._reader.read(READ_BYTES))
        try:
            await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not working.done():
                early = reading.result()
                if not early:
                    return None
                self._http.receive_data(early)
            return await working
        finally:
            for task in (working, reading):
                task.cancel()
            await asyncio.gather(working, reading, return_exceptions=True)

    async def answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        length = ("content-length", str(len(body)))
        await self._send(h11.Response(status_code=status, headers=[*headers, length]))
        await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def stream(self, events: AsyncIterator[bytes], headers: list[tuple[str, str]]) -> None:
        """Server-sent events."""
        kind = ("content-type", "text/event-stream")
        await self._send(h11.Response(status_code=200, headers=[*headers, kind, ("transfer-encoding", "chunked")]))
        async for event in events:
            await self._send(h11.Data(data=b"data: " + event + b"\n\n"))
        await self._send(h11.EndOfMessage())

    def next_cycle(self) -> bool:
        """Whether there may be another request on this connection."""
        with contextlib.suppress(h11.ProtocolError):
            self._http.start_next_cycle()
            return True
        return False

    async def _send(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()


def _asked(body: bytes) -> dict[str, Any]:
    """The request's fields. Raises _Refused for what cannot be done as it is asked."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(400, f"the request is no JSON: {error}") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("messages"), list):
        raise _Refused(400, "the request has no list of messages")
    if not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in asked["messages"]):
        raise _Refused(400, "a message is an object with a role")
    if not all(_is_calls(each.get("tool_calls")) for each in asked["messages"]):
        raise _Refused(400, "tool_calls of a message is a list of objects, each with an object `function`")
    choices = asked.get("n")
    if choices is not None and (type(choices) is not int or not 1 <= choices <= MOST_CHOICES):
        raise _Refused(400, f"n is {choices!r}, must be a whole number from 1 to {MOST_CHOICES}")
    if asked.get("top_logprobs"):
        raise _Refused(400, "top_logprobs: only the sampled token's log-prob is known")
    if asked.get("logit_bias"):
        raise _Refused(400, "logit_bias changes the distribution that the log-probs claim")
    if (asked.get("response_format") or {}).get("type", "text") != "text":
        raise _Refused(400, "response_format: only text, a grammar changes the distribution that the log-probs claim")
    if asked.get("tool_choice") not in (None, "auto", "none"):
        raise _Refused(400, "tool_choice: only auto and none, the policy is not forced")
    if asked.get("functions"):
        raise _Refused(400, "functions: use tools")
    return asked


def _is_calls(calls: Any) -> bool:
    return calls is None or (
        isinstance(calls, list)
        and all(isinstance(each, dict) and isinstance(each.get("function"), dict | None) for each in calls)
    )


async def _choices(session: _Session, asked: dict[str, Any]) -> list[Turn]:
    """`n` answers to the same messages, each in a sequence of its own but for one that may continue what is there."""
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
        raise _Refused(400, f"max_tokens is {limit!r}, must be a whole number above 0")
    stop = asked.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise _Refused(400, "stop must be a text or a list of texts")
    tools = asked.get("tools") if asked.get("tool_choice") != "none" else None
    messages = [_message(session, each) for each in asked["messages"]]
    return await session.calls.chat(messages, tools, max_new_tokens=limit, stop=tuple(stops))


def _message(session: _Session, message: Message) -> Message:
    """A message as the chat template wants it: an answer of ours that nobody has edited as it was sampled."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    handed = session.called.get(str(calls[0].get("id")))
    if handed is not None and _said(message) == _said(handed.message):
        return {"role": "assistant", "content": handed.text}
    return {**message, "tool_calls": [_parsed(call) for call in calls]}


def _said(message: Message) -> tuple[str, list[Any], bytes]:
    """What a message with tool calls says, whoever has written it: role, ids, and content and calls in one form."""
    calls = message["tool_calls"]
    said = [content_text(message) or "", called(calls)]
    return message["role"], [call.get("id") for call in calls], msgspec.json.encode(said, order="sorted")


def _parsed(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want a call's arguments as an object, OpenAI's messages have them as text."""
    function = call.get("function") or {}
    return {**call, "function": {**function, "arguments": arguments(function)}} if "arguments" in function else call


async def _chunks(whole: dict[str, Any], asked: dict[str, Any]) -> AsyncIterator[bytes]:
    """A finished completion as a stream: its text in one piece, since it is sampled in a block with others."""
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


def _error(message: str, code: str | None) -> bytes:
    return msgspec.json.encode(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    )
