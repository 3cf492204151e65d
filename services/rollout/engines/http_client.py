"""HTTP requests to an inference server, whole answers and streams of events. Must never wait without a deadline.

HTTP/1.1 is parsed by h11, as in the endpoint for agents; a connection serves one request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from proto.messages import ErrorCode
from shared.rpc.errors import RpcError

_READ_BYTES = 1 << 16
_CONNECT_S = 10.0
_SHOWN = 300  # so many characters of what a server says, in an error
_DATA = b"data:"
_DONE = b"[DONE]"


class Refused(RpcError):
    """The server answered with an error; `status` as HTTP has it."""

    def __init__(self, what: str, status: int, text: str) -> None:
        super().__init__(ErrorCode.BAD_REQUEST, f"{what}: HTTP {status}: {' '.join(text.split())[:_SHOWN]}")
        self.status = status


class HttpClient:
    """Holds no connection: any coroutine of any loop may use it."""

    def __init__(self, base_url: str, headers: Mapping[str, str], who: str, silence_s: float) -> None:
        """`base_url`: http or https, with or without a path; `silence_s`: the longest wait for the next bytes."""
        self._url = urlsplit(base_url.rstrip("/"))
        self._headers = dict(headers)
        self._who = who
        self._silence_s = silence_s

    async def get(self, path: str) -> Any:
        """The decoded JSON answer. Raises Refused, and RpcError(deadline) if there is none."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `get`."""
        return await self._whole("POST", path, body)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The decoded server-sent events of a POST up to `[DONE]`. Raises as `get`, also when the stream is cut."""
        rest = b""
        async with self._answered("POST", path, body) as parts:
            async for part in parts:
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if not line.startswith(_DATA):
                        continue
                    data = line[len(_DATA) :].strip()
                    if data == _DONE:
                        return
                    yield self._decoded(data, path)
        raise RpcError(ErrorCode.INTERNAL, f"{self._who}: POST {path}: the stream ended before its end")

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._answered(method, path, body) as parts:
            data = b"".join([part async for part in parts])
        return self._decoded(data, path) if data else None

    def _decoded(self, data: bytes, path: str) -> Any:
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise RpcError(ErrorCode.INTERNAL, f"{self._who}: {path}: no JSON in the answer ({error})") from None

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        what = f"{self._who}: {method} {self._url.geturl()}{path}"
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        opening = asyncio.open_connection(self._url.hostname, port, ssl=self._url.scheme == "https" or None)
        try:
            reader, writer = await asyncio.wait_for(opening, _CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise RpcError(
                ErrorCode.DEADLINE, f"{what}: no connection ({error or 'no answer'}); is the server running there?"
            ) from None
        try:
            connection = h11.Connection(h11.CLIENT)
            writer.write(self._request(connection, method, path, body))
            answer = await self._next(connection, reader, what)
            if not isinstance(answer, h11.Response):
                raise RpcError(ErrorCode.INTERNAL, f"{what}: the server closed the connection without an answer")
            parts = self._parts(connection, reader, what)
            if answer.status_code >= 400:
                text = b"".join([part async for part in parts]).decode(errors="replace")
                raise Refused(what, answer.status_code, text)
            yield parts
        except (OSError, TimeoutError, h11.RemoteProtocolError) as error:
            said = str(error) or f"silent for {self._silence_s:g} s"
            raise RpcError(ErrorCode.DEADLINE, f"{what}: {said}") from None
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _request(self, connection: h11.Connection, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        data = b"" if body is None else msgspec.json.encode(body)
        headers = {
            "host": self._url.netloc,
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(len(data)),
            **self._headers,
        }
        request = h11.Request(method=method, target=f"{self._url.path}{path}", headers=list(headers.items()))
        sent = connection.send(request) or b""
        return sent + (connection.send(h11.Data(data=data)) or b"") + (connection.send(h11.EndOfMessage()) or b"")

    async def _parts(self, connection: h11.Connection, reader: asyncio.StreamReader, what: str) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(connection, reader, what), h11.Data):
            yield bytes(event.data)

    async def _next(self, connection: h11.Connection, reader: asyncio.StreamReader, what: str) -> Any:
        while (event := connection.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(self._silence_s):
                connection.receive_data(await reader.read(_READ_BYTES))
        return event
