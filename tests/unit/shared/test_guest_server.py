"""The loopback server bounds every wait: for silent clients, for its shutdown, and for small responses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.guest_server import GuestServer, prove

pytestmark = pytest.mark.slow

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
REQUEST = HEAD + b"{}"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def application(answer: Callable[[Receive], Awaitable[None]]) -> ASGIApp:
    """Return an application that reads a request's body, awaits `answer`, then sends `ok`."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.request":
            await answer(receive)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    return called


async def at_once(_: Receive) -> None:
    pass


@asynccontextmanager
async def serving(app: ASGIApp, **options: Any) -> AsyncIterator[Callable[[bytes], Awaitable[Streams]]]:
    """Yield a function that connects to a server that runs `app` and sends the first bytes."""
    server = GuestServer(app, **options)
    await server.start()
    writers: list[asyncio.StreamWriter] = []

    async def connect(first: bytes) -> Streams:
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writers.append(writer)
        writer.write(first)
        return reader, writer

    try:
        yield connect
    finally:
        await server.stop()
        for writer in writers:
            writer.close()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\nok")


def test_a_silent_client_is_disconnected_wherever_it_stopped_unless_it_waits_for_a_response() -> None:
    async def scenario() -> None:
        gone = asyncio.Event()

        async def once_others_are_gone(_: Receive) -> None:
            await gone.wait()

        async with serving(application(once_others_are_gone), idle_s=1) as connect, asyncio.timeout(30):
            waiting, _ = await connect(REQUEST)
            silent = [await connect(first) for first in (b"", HEAD[:9], HEAD, HEAD + b"{")]
            for reader, _ in silent:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            gone.set()
            assert (await answer_of(waiting)).startswith(b"HTTP/1.1 200")
            assert await waiting.read() == b""  # The client was silent after receiving its response.

    asyncio.run(scenario())


def test_a_client_that_sends_its_request_byte_by_byte_is_disconnected_at_the_deadline() -> None:
    async def scenario() -> None:
        async with serving(application(at_once), arrival_s=0.5) as connect, asyncio.timeout(20):
            fast, writer = await connect(REQUEST)
            await answer_of(fast)
            slow = [await connect(first) for first in (b"", HEAD)]
            writer.write(HEAD[:1])  # This connection was idle. The time of its request begins now.
            for reader, sender in [*slow, (fast, writer)]:
                ended = asyncio.ensure_future(reader.read())
                while not ended.done():
                    sender.write(b"x")
                    await asyncio.wait({ended}, timeout=0.05)
                assert isinstance(ended.exception(), ConnectionError | None)

    asyncio.run(scenario())


def test_a_client_that_does_not_read_its_response_is_disconnected() -> None:
    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})
        responded.set()

    responded = asyncio.Event()

    async def scenario() -> None:
        async with serving(large, idle_s=1) as connect, asyncio.timeout(20):
            reader, _ = await connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await responded.wait()
            await asyncio.sleep(2)  # the client's deadline passes while it reads nothing
            with contextlib.suppress(ConnectionResetError):
                assert len(await reader.read()) < 32 << 20

    asyncio.run(scenario())


class Members:
    """An application whose requests prove their peers and are answered once `served` is set."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[None] = asyncio.Queue()
        self.served = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prove(scope)
        self.came.put_nowait(None)
        await application(self._answer)(scope, receive, send)

    async def _answer(self, _: Receive) -> None:
        await self.served.wait()


def test_strangers_displace_each_other_and_neither_newcomers_nor_proven_clients() -> None:
    async def scenario() -> None:
        members = Members()
        async with serving(members, most_connections=4) as connect, asyncio.timeout(20):
            client, _ = await connect(REQUEST)
            await members.came.get()
            strangers = [await connect(HEAD[:9]) for _ in range(12)]
            for reader, _ in strangers[:9]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            newcomer, _ = await connect(REQUEST)
            await members.came.get()
            members.served.set()
            for each in (client, newcomer):
                assert (await answer_of(each)).startswith(b"HTTP/1.1 200")

    asyncio.run(scenario())


def test_a_newcomer_is_refused_only_while_proven_requests_take_every_place() -> None:
    async def scenario() -> None:
        members = Members()
        async with serving(members, most_connections=2) as connect, asyncio.timeout(20):
            clients = [(await connect(REQUEST))[0] for _ in range(2)]
            for _ in clients:
                await members.came.get()
            late, _ = await connect(b"")
            assert b"503" in await late.read()
            members.served.set()
            for client in clients:
                await answer_of(client)
            late, _ = await connect(REQUEST)
            await answer_of(late)

    asyncio.run(scenario())


def test_one_connection_serves_pipelined_requests_in_order() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(10), serving(application(at_once)) as connect:
            reader, writer = await connect(HEAD)
            for rest in (b"{}", REQUEST, REQUEST + REQUEST):
                writer.write(rest)
                await answer_of(reader)
            await answer_of(reader)

    asyncio.run(scenario())


def test_shutdown_notifies_a_request_under_way_and_does_not_wait_for_it() -> None:
    async def scenario() -> str:
        came = asyncio.Event()
        told = ""

        async def until_gone(receive: Receive) -> None:
            nonlocal told
            came.set()
            told = (await receive())["type"]

        async with asyncio.timeout(10), serving(application(until_gone)) as connect:
            reader, _ = await connect(REQUEST)
            await came.wait()
        assert b"200" not in await reader.read()
        return told

    assert asyncio.run(scenario()) == "http.disconnect"


def test_a_request_that_ignores_the_shutdown_is_abandoned_after_a_second() -> None:
    async def scenario() -> None:
        came = asyncio.Event()

        async def deaf(_: Receive) -> None:
            came.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(10), serving(application(deaf)) as connect:
            await connect(REQUEST)
            await came.wait()

    asyncio.run(scenario())


def test_signal_handlers_of_the_process_are_not_changed() -> None:
    async def scenario() -> list[Any]:
        async with serving(application(at_once)) as connect:
            reader, _ = await connect(REQUEST)
            await answer_of(reader)  # The server is up.
            return [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    before = [signal.SIG_IGN, signal.SIG_DFL]
    kept = [signal.signal(each, to) for each, to in zip((signal.SIGINT, signal.SIGTERM), before, strict=True)]
    try:
        assert asyncio.run(scenario()) == before
    finally:
        for each, to in zip((signal.SIGINT, signal.SIGTERM), kept, strict=True):
            signal.signal(each, to)


def test_a_response_in_two_pieces_does_not_wait_for_an_acknowledgement() -> None:
    async def scenario() -> list[float]:
        took = []
        async with serving(application(at_once)) as connect:
            reader, writer = await connect(b"")
            for _ in range(60):  # At first, Linux acknowledges at once; later, it waits 40 ms.
                began = time.perf_counter()
                writer.write(REQUEST)
                await answer_of(reader)
                took.append(time.perf_counter() - began)
        return took

    assert min(asyncio.run(scenario())[50:]) < 0.02
