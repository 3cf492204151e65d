"""The HTTP interface of the page. It is private to the page and may change; scripts should use `launch.monitor --json`.

GET  /api/stream                                        server-sent events: head, services, pipeline, notices
GET  /api/metrics?run=&name=&name=&after=&epoch=        metric points of this run or of another run in the same folder
GET  /api/timeline?seconds=                             the work and waits of each process
GET  /api/log?level=&text=                              the newest log lines
GET  /api/samples?run=&split=&step=&task=&order=        the samples of a step or of a task
GET  /api/sample?run=&split=&step=&task=&sample=        one sample with its tokens
POST /api/operate  {"action": "restart"|"drain", "name": "rollout/0"}, header X-Operator-Token
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from proto.errors import WireError
from services.web import samples
from services.web.files import Files
from services.web.guard import API, Guard
from services.web.live_parts import MAX_STREAMS
from services.web.page import Page
from shared.guest_server import Secret
from shared.rpc.errors import RpcError
from shared.runfiles.files import RunFiles
from shared.samples.reader import Order
from shared.view.timeline import thinned

MAX_NAMES = 64
"""Maximum number of metrics in one request."""
MAX_BODY_BYTES = 1024
MAX_LOG_LINES = 500
MAX_TIMELINE_S = 600.0
MAX_PIECES = 1000
"""Number of pieces of a time line, about one per pixel. Spans of the same kind with a smaller gap are sent as one."""
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
        now = time.time()
        view = self._page.own.view
        return _json(
            {
                "now": now,
                "seconds": seconds,
                "lanes": [
                    {
                        "name": lane.name,
                        "known_s": lane.known_s,
                        "working_s": lane.working_s,
                        "waiting_s": lane.waiting_s,
                        "waits": [[wait.what[:80], wait.of[:80], wait.seconds] for wait in lane.waits],
                        "spans": [
                            [round(span.begin - now, 3), round(span.end - now, 3), span.what[:80], span.of[:80], count]
                            for span, count in thinned(lane.spans, seconds / MAX_PIECES)
                        ],
                    }
                    for lane in view.timeline(now, seconds)
                ],
                "steps": [[round(end.at - now, 3), end.step] for end in view.step_ends(now, seconds)],
            }
        )

    async def log(self, request: Request) -> Response:
        query = request.query_params
        self._page.own.read_logs()
        lines = self._page.own.view.log(level=query.get("level", "info"), containing=query.get("text", ""))
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
