"""Serves OpenAI's API to a server's clients: models, chat completions and text completions.

A model is the name of a base or the path of a sampler. Requests choose how to sample, unlike those of an agent in a
training run; what would sample from another distribution than the log-probs describe is refused. `system_fingerprint`
names the version that made the tokens: `weights/<model>/<step>`, or `base`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from proto.messages import ErrorCode, WeightsRef
from proto.tensors import Array
from services.policy_trainer.sampling.request import SampledPrompt, SamplingRequest, version_name
from shared.openai_api.replies import chat_choice, completion, error, model_list, reply, stream, text_choice
from shared.openai_api.requests import (
    body_of,
    chat_of,
    fields_of,
    limit_of,
    stops_of,
    tools_of,
    unless_gone,
)
from shared.openai_api.tools import tool_calls, with_objects
from shared.rpc.errors import RpcError
from shared.workflow import Turn

TEXT_TOKENS = 16
"""Default of `max_tokens` of a text completion, as in OpenAI's API."""
MAX_PROMPTS = 128
_REFUSED = {"presence_penalty": 0, "frequency_penalty": 0, "min_p": 0, "repetition_penalty": 1}
"""Fields that change the distribution, each with the value that does not."""
_ONLY_TEXT = {"echo": False, "suffix": "", "best_of": 1}
_TOO_MANY = "rate_limit_exceeded"
_STATUS: Mapping[str, tuple[int, str | None]] = MappingProxyType(
    {
        ErrorCode.BAD_REQUEST: (400, None),
        ErrorCode.GONE: (404, "model_not_found"),
        ErrorCode.BUSY: (429, _TOO_MANY),
        ErrorCode.LOST: (503, None),
        ErrorCode.DEADLINE: (503, None),
    }
)
"""The status and the code for errors of samples. All others are defects."""
_DEFECT, _LEFT = 500, 499


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that clients ask for by `name`. Its `version` is None for the base."""

    name: str
    version: WeightsRef | None


class ServedModels(Protocol):
    """The models that a client may use. Its key is known from the request."""

    def names(self, request: Request) -> list[str]:
        """Return the names of the client's models."""

    def find(self, name: str, request: Request) -> ServedModel | None:
        """Return a model, or None if there is none or it belongs to another client."""


class SamplesPrompts(Protocol):
    """The interface of `Sampler` that is used here."""

    def sample(self, request: SamplingRequest) -> Awaitable[SampledPrompt]: ...

    def render(self, row: dict[str, Any]) -> Awaitable[Array]: ...


def openai_app(sampler: SamplesPrompts, models: ServedModels) -> Starlette:
    """Return the application with the paths `/models`, `/chat/completions` and `/completions`, to be mounted at `/v1`.

    Whoever mounts it has checked the key.
    """
    served = _Served(sampler, models)
    routes = [
        Route("/models", served.list_models),
        Route("/chat/completions", served.chat, methods=["POST"]),
        Route("/completions", served.complete, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, RpcError, ClientDisconnect), _failed)
    application = Starlette(routes=routes, exception_handlers=handlers)
    application.router.redirect_slashes = False
    return application


class _Served:
    """The endpoints."""

    def __init__(self, sampler: SamplesPrompts, models: ServedModels) -> None:
        self._sampler = sampler
        self._models = models
        self._numbers = itertools.count(1)

    async def list_models(self, request: Request) -> Response:
        return reply(model_list(self._models.names(request)))

    async def chat(self, request: Request) -> Response:
        asked = chat_of(await body_of(request))
        model = self._model(request, asked)
        wanted = _wanted(model, asked, limit_of(asked) or 0)
        messages = [with_objects(each) if each.get("tool_calls") else each for each in asked["messages"]]
        row = {"prompt": messages, "tools": tools_of(asked)}
        (turns,) = await unless_gone(request, self._turns(wanted, [row], calls=bool(row["tools"])))
        number = next(self._numbers)
        choices = [chat_choice(turn, asked, f"{number}_{index}", index) for index, turn in enumerate(turns)]
        whole = completion("chat.completion", number, model.name, turns, choices, asked)
        return stream(_by(model, whole), asked)

    async def complete(self, request: Request) -> Response:
        asked = fields_of(await body_of(request))
        for name, neutral in _ONLY_TEXT.items():
            if asked.get(name) not in (None, neutral):
                raise HTTPException(400, f"{name} is not supported; leave it out")
        model = self._model(request, asked)
        wanted = _wanted(model, asked, limit_of(asked) or TEXT_TOKENS)
        groups = await unless_gone(request, self._turns(wanted, _prompts(asked.get("prompt")), calls=False))
        turns = [turn for group in groups for turn in group]
        choices = [text_choice(turn, asked, index) for index, turn in enumerate(turns)]
        whole = completion("text_completion", next(self._numbers), model.name, turns, choices, asked)
        return stream(_by(model, whole), asked)

    def _model(self, request: Request, asked: Mapping[str, Any]) -> ServedModel:
        name = asked.get("model")
        if not isinstance(name, str):
            raise HTTPException(400, "model is missing: name a model or the path of a sampler")
        model = self._models.find(name, request)
        if model is None:
            text = f"model {name[:200]!r} does not exist; GET /v1/models lists those that do"
            raise RpcError(ErrorCode.GONE, text)
        return model

    async def _turns(
        self, wanted: SamplingRequest, prompts: Sequence[dict[str, Any] | list[int]], *, calls: bool
    ) -> list[list[Turn]]:
        """Return the answers to each prompt."""
        work = [asyncio.create_task(self._turns_of(wanted, prompt, calls)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*work))
        finally:
            for each in work:
                each.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _turns_of(self, wanted: SamplingRequest, prompt: dict[str, Any] | list[int], calls: bool) -> list[Turn]:
        ids = np.array(prompt, np.int32) if isinstance(prompt, list) else await self._sampler.render(prompt)
        result = await self._sampler.sample(replace(wanted, token_ids=ids))
        return [
            Turn(
                text=each.text,
                token_ids=each.token_ids.tolist(),
                logprobs=each.logprobs.tolist(),
                versions=each.versions.tolist(),
                finish_reason=each.reason,
                prompt_tokens=len(ids),
                tool_calls=tool_calls(each.text) if calls else [],
            )
            for each in result.sequences
        ]


def _wanted(model: ServedModel, asked: Mapping[str, Any], max_tokens: int) -> SamplingRequest:
    """Return what a request asks for, still without its prompt. Raises HTTPException."""
    for name, neutral in _REFUSED.items():
        if asked.get(name) not in (None, neutral):
            raise HTTPException(400, f"{name} would change the distribution that the log-probs describe; leave it out")
    seed = _number(asked, "seed", secrets.randbits(63), whole=True)
    return SamplingRequest(
        version=model.version,
        token_ids=np.zeros(0, np.int32),
        seed=int(seed) & ((1 << 63) - 1),
        samples=asked.get("n") or 1,
        max_tokens=max_tokens,
        temperature=_number(asked, "temperature", 1.0),
        top_p=_number(asked, "top_p", 1.0),
        top_k=max(int(_number(asked, "top_k", 0, whole=True)), 0),
        stop=stops_of(dict(asked)),
        texts=True,
    )


def _number(asked: Mapping[str, Any], name: str, default: float, *, whole: bool = False) -> float:
    value = asked.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise HTTPException(400, f"{name} is {value!r:.40}, but must be a {'whole ' * whole}number")
    return value


def _prompts(prompt: Any) -> list[dict[str, Any] | list[int]]:
    """Return the prompts of a text completion: texts, or tokens. Raises HTTPException."""
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise HTTPException(400, f"prompt: {len(prompts)} prompts; at most {MAX_PROMPTS} in a request")
    made: list[dict[str, Any] | list[int]] = []
    for each in prompts:
        if isinstance(each, str):
            made.append({"prompt": each})
        elif isinstance(each, list) and each and all(type(token) is int and 0 <= token < 1 << 31 for token in each):
            made.append(each)
        else:
            raise HTTPException(400, "prompt must be a text, a list of token ids, or a list of those")
    return made


def _by(model: ServedModel, whole: dict[str, Any]) -> dict[str, Any]:
    return {**whole, "system_fingerprint": version_name(model.version) or "base"}


async def _failed(_: Request, failed: Exception) -> Response:
    if isinstance(failed, HTTPException):
        return error(failed.status_code, failed.detail)
    if isinstance(failed, ClientDisconnect):
        return error(_LEFT, "the client has left")
    status, code = _STATUS.get(failed.code if isinstance(failed, RpcError) else "", (_DEFECT, None))
    retry = {"retry-after": f"{max(1, round(failed.retry_after_s))}"} if isinstance(failed, RpcError) else {}
    kind = "server_error" if status >= _DEFECT else "invalid_request_error"
    return error(status, str(failed), code, kind, retry if code == _TOO_MANY else {})
