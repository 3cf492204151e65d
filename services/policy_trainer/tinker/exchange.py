"""How requests are read and answered, whatever they are about."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.policy_trainer.tinker import bodies
from services.policy_trainer.tinker.errors import BadRequest, Category

PROTOBUF, JSON = "application/x-protobuf", "application/json"
T = TypeVar("T")
KEY = "key"
"""Name of the entry of a request's state with the name of its key."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises BadRequest(413) as soon as it is too long."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BadRequest(f"the body has {announced} bytes; the limit is {limit} (serve.body_limit)", 413)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise BadRequest("content-encoding: send the body uncompressed (client/config says so)", 415)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BadRequest(f"the body has more than {limit} bytes (serve.body_limit)", 413)
        parts.append(part)
    return b"".join(parts)


async def read(request: Request, limit: int, kind: type[T]) -> T:
    """Return the JSON body of a request, of `limit` bytes or fewer. Raises BadRequest."""
    return bodies.read(await read_body(request, limit), kind)


def key_of(request: Request) -> str:
    """Return the name of the client's key."""
    name: str = request.scope["state"][KEY]
    return name


def answer(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def pending(name: str) -> Response:
    """Return the answer to a poll whose future is not done. The SDK repeats the poll at once."""
    return answer({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)


def failed(message: str, category: Category) -> Response:
    """Return the answer to a poll whose future has failed."""
    return answer({"error": message, "category": category})


async def not_served(request: Request) -> Response:
    path = request.path_params["path"][:80]
    return answer({"detail": f"{path}: is not part of this server; docs/serving.md lists what is"}, 404)


async def refused(request: Request, error: Exception) -> Response:
    """Answer a request that was refused with a BadRequest."""
    return answer({"detail": str(error)}, error.status if isinstance(error, BadRequest) else 500)


async def left(request: Request, error: Exception) -> Response:
    """Answer nobody: the client has gone before it had sent its whole request."""
    return Response(status_code=400)
