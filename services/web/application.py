"""The HTTP interface of the page: its files, its data, and the requests that it admits. It is private to the page and
may change; scripts should use `launch.monitor --json`.

GET  /api/stream                                        server-sent events: look, head, services, pipeline, notices
GET  /api/metrics?run=&name=&name=&after=&epoch=        metric points of this run or of another run in the same folder
GET  /api/timeline?seconds=                             the work and waits of each process
GET  /api/log?level=&text=                              the newest log lines
GET  /api/samples?run=&split=&step=&task=&order=        the samples of a step or of a task
GET  /api/sample?run=&split=&step=&task=&sample=        one sample with its tokens
POST /api/operate  {"action": "restart"|"drain", "name": "rollout/0"}, header X-Operator-Token
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import math
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proto.errors import WireError
from services.web import parts, samples
from services.web.live_parts import MAX_STREAMS
from services.web.page import Page
from shared.guest_server import OwnNames, Secret, prove
from shared.rpc.errors import RpcError
from shared.runfiles.files import RunFiles
from shared.samples.reader import Order

API = "/api/"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
INDEX = "index.html"
MAX_NAMES = 64
"""Maximum number of metrics in one request."""
MAX_BODY_BYTES = 1024
MAX_LOG_LINES = 500
MAX_TIMELINE_S = 600.0
READERS = 2
"""Maximum number of requests that read samples at the same time."""
OPERATOR_TOKEN = "x-operator-token"  # noqa: S105  # the name of a header


class Operation(msgspec.Struct, forbid_unknown_fields=True):
    """An operator command."""

    action: str
    name: str


def application(page: Page, token: Secret | None, operator: Secret | None) -> ASGIApp:
    """Return the guarded application. Without `operator`, nothing can be restarted or drained."""
    handlers = _Handlers(page, operator)
    files = Files()
    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "metrics": handlers.metrics,
        "timeline": handlers.timeline,
        "log": handlers.log,
        "samples": handlers.samples,
        "sample": handlers.sample,
        "stream": handlers.stream,
    }
    routes = [Route("/", files.answer), *(Route(f"{API}{name}", answer) for name, answer in gets.items())]
    routes.append(Route(f"{API}operate", handlers.operate, methods=["POST"]))
    routes.append(Route("/{name}", files.answer))
    # The streams are server-sent events, which this middleware does not compress.
    app = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, compresslevel=4)])
    return Guard(app, token)


class Guard:
    """Refuses unknown host names, requests from other sites, and, if there is a token, requests for data without it.

    Tokens are sent in headers that no other site can make a browser send, and never in cookies or addresses. The page
    itself contains no data and needs no token.
    """

    def __init__(self, application: ASGIApp, token: Secret | None) -> None:
        self._application = application
        self._token = token
        self._names = OwnNames()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(scope, Headers(scope=scope))
        answer = self._application if refused is None else PlainTextResponse(refused[1], refused[0])
        await answer(scope, receive, send_confined)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Return the HTTP status and the reason for refusing a request, or None if the request is admitted."""
        host = headers.get("host", "")
        if why := self._names.refusal(host):
            return 421, why
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "this page answers its own requests only"
        if scope["path"].startswith(API) and self._token is not None:
            if not self._token.is_borne_by(headers.get("authorization", "")):
                return 401, "the token is missing or wrong"
            prove(scope)
        return None


class Files:
    """The files in `static/`, by name."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for file in resources.files("services.web").joinpath("static").iterdir():
            data = file.read_bytes()
            headers = {
                "content-type": TYPES[file.name.rpartition(".")[2]],
                "content-encoding": "gzip",
                "cache-control": "no-cache",
                "etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"',
            }
            self._files[file.name] = (gzip.compress(data, mtime=0), headers)

    async def answer(self, request: Request) -> Response:
        """Return a file, or the page itself if the request has no file name."""
        file = self._files.get(request.path_params.get("name", INDEX))
        if file is None:
            return Response(status_code=404)
        data, headers = file
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers={"etag": headers["etag"]})
        return Response(data, headers=headers)


class _Handlers:
    def __init__(self, page: Page, operator: Secret | None) -> None:
        self._page = page
        self._operator = operator
        self._reading = asyncio.Semaphore(READERS)

    async def stream(self, request: Request) -> Any:
        if self._page.parts.watchers >= MAX_STREAMS:
            raise HTTPException(503, f"{MAX_STREAMS} browsers are already following this run; close one")
        return self._page.parts

    async def metrics(self, request: Request) -> Response:
        query, files = request.query_params, await self._files(request)
        names = query.getlist("name")[:MAX_NAMES]
        same = query.get("epoch") == str(files.epoch)
        after = _number(query.get("after"), -1.0) if same else -1.0
        points = files.points(names, after)
        return _json(
            {
                "epoch": files.epoch,
                "last": files.last_step,
                "names": files.names(),
                "whole": after < 0,
                "points": {name: points[name] for name in names},
            }
        )

    async def timeline(self, request: Request) -> Response:
        seconds = min(max(_number(request.query_params.get("seconds"), 60.0), 1.0), MAX_TIMELINE_S)
        live, own = self._page.calls is not None, self._page.own
        now = time.time() if live else own.view.timeline_end or time.time()
        return _json(parts.timeline(own, now, seconds))

    async def log(self, request: Request) -> Response:
        query = request.query_params
        self._page.own.read_logs()
        lines = self._page.own.view.log.lines(level=query.get("level", "info"), containing=query.get("text", ""))
        return _json({"lines": lines[-MAX_LOG_LINES:]})

    async def samples(self, request: Request) -> Response:
        query, run = request.query_params, (await self._files(request)).path
        step, order = int(_number(query.get("step"), -1.0)), query.get("order")
        async with self._reading:
            listed = await asyncio.to_thread(
                samples.listed,
                run,
                query.get("split", ""),
                step if step >= 0 else None,
                task=query.get("task", ""),
                order=Order(order) if order in set(Order) else None,
            )
        return _json(listed)

    async def sample(self, request: Request) -> Response:
        query, run = request.query_params, (await self._files(request)).path
        step, number = (int(_number(query.get(name), -1.0)) for name in ("step", "sample"))
        async with self._reading:
            shown = await asyncio.to_thread(
                samples.shown, run, query.get("split", ""), step, query.get("task", ""), number
            )
        if shown is None:
            raise HTTPException(404, "this sample no longer exists")
        return _json(shown)

    async def operate(self, request: Request) -> Response:
        if self._operator is None:
            raise HTTPException(403, "monitor.web.operator_token is not set, so this page cannot change anything")
        if not self._operator.matches(request.headers.get(OPERATOR_TOKEN, "")):
            raise HTTPException(403, "the operator token is missing or wrong")
        if self._page.calls is None:
            raise HTTPException(409, "the run has ended")
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"more than {MAX_BODY_BYTES} bytes")
        try:
            operation = msgspec.json.decode(body, type=Operation)
            await self._page.calls.act(operation.action, operation.name)
        except msgspec.MsgspecError as error:
            raise HTTPException(400, str(error)) from None
        except (RpcError, WireError) as error:
            raise HTTPException(409, str(error)) from None
        return PlainTextResponse(f"{operation.action} {operation.name}: ordered")

    async def _files(self, request: Request) -> RunFiles:
        name = request.query_params.get("run", "")
        files = await self._page.files(name)
        if files is None:
            raise HTTPException(404, f"no run {name[:100]!r} in the same folder as this run")
        return files


def _number(text: str | None, default: float) -> float:
    try:
        number = float(text) if text else default
    except ValueError:
        return default
    return number if math.isfinite(number) else default


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers={"cache-control": "no-store"})
