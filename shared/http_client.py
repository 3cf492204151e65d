"""Sends HTTP requests to an inference server and reads responses or event streams. Every wait has a deadline."""

from __future__ import annotations

import math
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

_CONNECT_S = 10.0
_EVENT_BYTES = 64 << 20
"""Maximum size of one server-sent event."""
_SHOWN = 300
"""Maximum number of characters of a server's answer that an error quotes."""
_DONE = "[DONE]"


class HttpRefused(RpcError):
    """The server responded with an error. `status` is the HTTP status, and `retry_after_s` the pause that it asks for,
    or 0.0."""

    def __init__(self, what: str, status: int, text: str, retry_after_s: float = 0.0) -> None:
        shown = f"{what}: HTTP {status}: {' '.join(text.split())[:_SHOWN]}"
        super().__init__(ErrorCode.BAD_REQUEST, shown, retry_after_s=retry_after_s)
        self.status = status


class HttpClient:
    """A client that keeps no connection open, so coroutines on any loop may use it."""

    def __init__(self, base_url: str, headers: Mapping[str, str], who: str, silence_s: float) -> None:
        """`base_url` is http or https, with or without a path; `silence_s` is the maximum number of seconds to wait for
        the next bytes."""
        self._url = base_url.rstrip("/")
        self._headers = {"content-type": "application/json", **headers}
        self._who = who
        self._silence_s = silence_s
        # Loading the certificate authorities takes 50 ms. Without TLS, an empty context is enough.
        https = base_url.startswith("https:")
        self._tls = ssl.create_default_context() if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    async def get(self, path: str) -> Any:
        """Return the decoded JSON response. Raises HttpRefused, and RpcError(deadline) if no response arrives."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the decoded JSON response to a POST. Raises the same errors as `get`."""
        return await self._whole("POST", path, body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Yield the decoded server-sent events in the response to a POST, up to `[DONE]`. Raises the same errors as
        `get`."""
        async with self._answered("POST", path, body) as answer:
            async for event in httpx2.EventSource(answer, _EVENT_BYTES):
                if event.data == _DONE:
                    return
                yield self._decoded(event.data, path)
        raise RpcError(ErrorCode.INTERNAL, f"{self._who}: POST {path}: the stream ended early")

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._answered(method, path, body) as answer:
            data = await answer.aread()
        return self._decoded(data, path) if data else None

    def _decoded(self, data: str | bytes, path: str) -> Any:
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise RpcError(ErrorCode.INTERNAL, f"{self._who}: {path}: the answer is not valid JSON ({error})") from None

    @asynccontextmanager
    async def _answered(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx2.Response]:
        what = f"{self._who}: {method} {self._url}{path}"
        content = None if body is None else msgspec.json.encode(body)
        timeout = httpx2.Timeout(self._silence_s, connect=_CONNECT_S)
        try:
            async with (
                # The environment's proxies and .netrc file are ignored, because the topology names the server.
                httpx2.AsyncClient(headers=self._headers, timeout=timeout, verify=self._tls, trust_env=False) as client,
                client.stream(method, f"{self._url}{path}", content=content) as answer,
            ):
                if answer.is_error:
                    text = (await answer.aread()).decode(errors="replace")
                    raise HttpRefused(what, answer.status_code, text, _seconds(answer.headers.get("Retry-After")))
                yield answer
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.InvalidURL) as error:
            detail = str(error) or "no answer"
            raise RpcError(
                ErrorCode.DEADLINE, f"{what}: no connection ({detail}); is the server running there?"
            ) from None
        except httpx2.RequestError as error:
            detail = str(error) or f"silent for {self._silence_s:g} s"
            raise RpcError(ErrorCode.DEADLINE, f"{what}: {detail}") from None


def _seconds(retry_after: str | None) -> float:
    """Return the seconds in a Retry-After header, or 0.0 if it is absent or holds a date."""
    try:
        seconds = float(retry_after or 0.0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds >= 0 else 0.0
