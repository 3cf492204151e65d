"""The HTTP application of `monitor.prometheus`: serves GET /metrics, and requires the token if there is one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, cast

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from shared.guest_server import Secret, prove

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PATH = "/metrics"


class _Present:
    """The metrics of one scrape, with the interface that prometheus_client expects from a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class Scrape:
    """An ASGI application. It answers each scrape from memory, so a slow scraper delays only its own connection."""

    def __init__(self, metrics: Callable[[], Awaitable[Iterable[Metric]]], token: str = "") -> None:
        """`metrics` returns the current metrics. `token` is the bearer token, or an empty string if there is none."""
        self._metrics = metrics
        self._token = Secret(token) if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._answer(scope))(scope, receive, send)

    async def _answer(self, scope: Scope) -> Response:
        headers = Headers(scope=scope)
        if scope["path"] != PATH:
            return PlainTextResponse(f"metrics are at {PATH}\n", 404)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("", 405, {"allow": "GET, HEAD"})
        if self._token is not None:
            if not self._token.is_borne_by(headers.get("authorization", "")):
                text = "the token is missing or wrong; give it to the scraper (authorization: credentials_file)\n"
                return PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})
            prove(scope)
        encode, content_type = choose_encoder(headers.get("accept", ""))
        present = cast("CollectorRegistry", _Present(await self._metrics()))
        return Response(encode(present), headers={"content-type": content_type})
