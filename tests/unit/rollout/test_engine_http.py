"""Gives the HTTP client for an inference server complete, fragmented, truncated and error responses over real
sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from shared.http_client import HttpClient, HttpRefused
from shared.rpc.errors import RpcError


def ask(pieces: Sequence[bytes], path: str = "/x", *, stream: bool, silence_s: float = 20.0) -> tuple[Any, bytes]:
    """Return the client's result for a response sent in `pieces`, and the request that the client sent."""
    asked = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked = await reader.readuntil(b"\r\n\r\n")
        asked += await reader.readexactly(int(asked.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if silence_s >= 1:
            writer.close()
        else:
            await reader.read()  # This waits until the client gives up.
            writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = HttpClient(f"http://127.0.0.1:{port}/base/", {"authorization": "Bearer k"}, "engine", silence_s)
        async with server:
            if stream:
                return [each async for each in client.events(path, {"n": 1})]
            return await client.post(path, {"n": 1})

    return asyncio.run(run()), asked


def whole(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunked(*parts: bytes) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)]


def test_a_response_is_decoded_and_the_path_is_below_the_base_url() -> None:
    answer, asked = ask([whole(b'{"a": [1]}')], stream=False)
    assert answer == {"a": [1]}
    assert asked.startswith(b"POST /base/x HTTP/1.1\r\n")
    assert b"authorization: Bearer k" in asked
    assert asked.endswith(b'\r\n\r\n{"n":1}')


def test_events_are_joined_wherever_they_were_split() -> None:
    text = b'data: {"at": 0}\n\n: a comment\ndata:{"at": 1}\r\n\r\ndata: [DONE]\n\n'
    for cut in range(1, len(text)):
        pieces = [*chunked(text[:cut], text[cut:]), b"0\r\n\r\n"]
        assert ask(pieces, stream=True)[0] == [{"at": 0}, {"at": 1}]


def test_a_stream_that_ends_early_is_not_a_complete_response() -> None:
    with pytest.raises(RpcError, match="the stream ended early"):
        ask([*chunked(b'data: {"at": 0}\n\n'), b"0\r\n\r\n"], stream=True)
    with pytest.raises(RpcError, match=r"engine: POST http://127.0.0.1:\d+/base/x: "):
        ask(chunked(b'data: {"at": 0}\n\n'), stream=True)  # The connection breaks here.


def test_a_refusal_produces_a_one_line_error_with_its_status() -> None:
    with pytest.raises(HttpRefused, match=r"HTTP 404: no such route$") as caught:
        ask([whole(b"no such\n route", "404 Not Found")], stream=False)
    assert caught.value.status == 404


def test_a_silent_server_times_out() -> None:
    with pytest.raises(RpcError, match=r"silent for 0.2 s"):
        ask([b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"], stream=False, silence_s=0.2)


def test_a_line_of_an_event_ends_only_at_a_line_feed() -> None:
    text = '{"text": "\u2028\x85"}'
    assert ask([*chunked(f"data: {text}\n\ndata: [DONE]\n\n".encode()), b"0\r\n\r\n"], stream=True)[0] == [
        {"text": "\u2028\x85"}
    ]


def test_a_complete_response_in_place_of_a_stream_is_reported() -> None:
    with pytest.raises(RpcError, match="Expected response with content type 'text/event-stream'"):
        ask([whole(b'{"a": 1}')], stream=True)


def test_proxies_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask([whole(b"{}")], stream=False)[0] == {}


def test_an_absent_server_is_reported_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", {}, "engine", 20.0)
    with pytest.raises(
        RpcError, match=rf"engine: GET http://127.0.0.1:{port}/x: no connection .* is the server running"
    ):
        asyncio.run(client.get("/x"))


def test_a_request_that_is_cancelled_closes_its_connection() -> None:
    async def scenario() -> bytes:
        came = asyncio.Event()
        rest: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b'{"n":1}')
            writer.write(chunked(b'data: {"at": 0}\n\n')[0])
            came.set()
            rest.set_result(await reader.read())
            writer.close()

        async def listen() -> None:
            async for _ in client.events("/x", {"n": 1}):
                pass

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", {}, "engine", 20.0)
        async with server, asyncio.timeout(10):
            listening = asyncio.create_task(listen())
            await came.wait()
            listening.cancel()
            return await rest

    assert asyncio.run(scenario()) == b""


def test_a_response_that_is_not_json_is_reported() -> None:
    with pytest.raises(RpcError, match="engine: /x: the answer is not valid JSON"):
        ask([whole(b"<html>")], stream=False)
