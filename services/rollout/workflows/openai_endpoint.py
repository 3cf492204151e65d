"""Serves OpenAI's chat-completions API to agents that know nothing about rlbus.

Each call is captured in the sample whose base URL it was sent to. The endpoint listens on the loopback interface only.
A request may shorten an answer (max_tokens, stop) but cannot change the sampling distribution: its temperature, top_p,
penalties and seed are overridden by the topology's sampling settings, and the response header `x-overridden` names the
overridden fields. The first request changed in this way is also reported in the log and on the console.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from proto.messages import Trouble, TroubleKind
from services.rollout.workflows.calls import SampleCalls
from shared.data.source import content_text
from shared.guest_server import GuestServer, prove
from shared.openai_api.replies import chat_choice, completion, error, model_list, reply, stream
from shared.openai_api.requests import body_of, chat_of, limit_of, stops_of, tools_of, unless_gone
from shared.openai_api.tools import called, with_objects
from shared.workflow import ContextFull, Message, Turn, WorkflowError

_NEUTRAL = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,)}
"""Values of fields that request what happens anyway. The first one describes it."""
_NO_SAMPLE = "no running sample has this address: use ctx.base_url of a running workflow"


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
        return reply(model_list([self._model]))

    async def _chat_completions(self, request: Request) -> Response:
        session = self._session(request)
        asked = chat_of(await body_of(request))
        overridden = self._changes(asked, session.calls.temperature)
        headers = {"x-overridden": ",".join(overridden)} if overridden else {}
        turns = await unless_gone(request, _choices(session, asked))
        number = next(self._numbers)
        choices = [chat_choice(turn, asked, f"{number}_{index}", index) for index, turn in enumerate(turns)]
        for turn, choice in zip(turns, choices, strict=True):
            message = choice["message"]
            if "tool_calls" in message:
                session.called[message["tool_calls"][0]["id"]] = _Handed(message, turn.text)
        whole = completion("chat.completion", number, self._model, turns, choices, asked)
        return stream(whole, asked, headers)

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
        return error(404, f"no {request.method} {parts[4]}: {only}" if is_session else _NO_SAMPLE)

    async def _failed(self, request: Request, defect: Exception) -> Response:
        self._log.error("call failed", exc_info=defect)
        return error(500, f"{type(defect).__name__}; see the log of the rollout service", kind="server_error")


async def _refuse(_: Request, refused: Exception) -> Response:
    if isinstance(refused, HTTPException):
        return error(refused.status_code, refused.detail)
    return error(400, str(refused), "context_length_exceeded" if isinstance(refused, ContextFull) else None)


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
    limit, stop, tools = limit_of(asked), stops_of(asked), tools_of(asked)
    messages = [_message(session, message) for message in asked["messages"]]
    return await session.calls.chat(messages, tools, max_new_tokens=limit, stop=stop)


def _message(session: _Session, message: Message) -> Message:
    """Return the message for the chat template. An unedited answer from the policy is replaced by the sampled text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    handed = session.called.get(str(calls[0].get("id")))
    if handed is not None and _canonical(message) == _canonical(handed.message):
        return {"role": "assistant", "content": handed.text}
    return with_objects(message)


def _canonical(message: Message) -> tuple[str, list[Any], bytes]:
    """Return the canonical form of a message with tool calls: its role, the calls' ids, and its content and calls as
    JSON."""
    calls = message["tool_calls"]
    said = [content_text(message) or "", called(calls)]
    return message["role"], [call.get("id") for call in calls], msgspec.json.encode(said, order="sorted")
